from tests.loop_watch import no_callback_holds_up_the_loop

__all__ = ["no_callback_holds_up_the_loop"]
