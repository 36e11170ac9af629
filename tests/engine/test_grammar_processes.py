"""Real grammar processes, with a vocabulary of the 256 bytes, a token of 64 dashes and the end of sequence."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from structlog.testing import capture_logs

from tandem.engine.errors import GrammarViolated
from tandem.engine.grammar import processes as module
from tandem.engine.grammar.compiler import compile_text, make_library
from tandem.engine.grammar.matcher import GrammarState
from tandem.engine.grammar.messages import Limits
from tandem.engine.grammar.processes import Constraint, GrammarProcesses
from tandem.telemetry.log import read_line
from tandem.wire.errors import EngineFailed, InvalidRequest, Overloaded
from tandem.wire.generation import Grammar
from tests.engine.test_grammar import allowed_ids, ebnf, regex
from tests.patience import PATIENCE_S, until
from tests.sample import sampled

pytestmark = pytest.mark.slow

# Each keeps the library busy for hours or for ever, some while they compile, others a few dashes later.
ENDLESS = {
    "nested empty repetition": regex("((-*)*)*"),
    "nested counts": ebnf('root ::= (("-"{0,99}){0,99}){0,99}'),
    "counts of rules": ebnf("root ::= a{0,999}\na ::= b{0,999}\nb ::= [^x]{0,999}"),
    "optional parts in a row": regex("(-?){300}(-?){300}(-?){300}"),
    "ambiguous": ebnf('root ::= root root | "-"'),
    "ambiguous and empty": ebnf('root ::= root root | "-" | ""'),
    "mutual recursion": ebnf('root ::= (a | b)*\na ::= b* a | ""\nb ::= a* b | "-"'),
    "ambiguous counts": ebnf(
        'root ::= s{0,99} s{0,99} s{0,99}\ns ::= t{0,99} t{0,99}\nt ::= ("-" | "--" | "---"){0,99}'
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, dict[str, int], int]:
    """A directory with a tokenizer, its vocabulary, and the number of tokens."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "-" * 64]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: index for index, word in enumerate(words)}, [])
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    folder = tmp_path_factory.mktemp("dashes")
    made.save(str(folder / "tokenizer.json"))
    return folder, made.get_vocab(), made.get_vocab_size()


@pytest.fixture(scope="module")
def shared(model):
    folder, ids, vocab_size = model
    made = GrammarProcesses(folder, vocab_size, frozenset({ids["</s>"]}))
    yield made
    end(made)


@pytest.fixture
def processes(shared):
    """The processes, with their default limits."""
    shared.limits = Limits()
    yield shared
    shared.limits = Limits()


@pytest.fixture
def begin(processes):
    """Begin an answer whose masks the test waits for."""

    def begin(grammar: Grammar, token_ids=()) -> Constraint:
        return processes.open(grammar, token_ids, lambda: None)

    return begin


@pytest.fixture
def new_pid(processes):
    """Return the id of the process that the test started; the first call finds it."""
    before = set(children(host_pid(processes))) if processes._host else set()

    @functools.cache
    def new_pid() -> int:
        (pid,) = set(children(host_pid(processes))) - before
        return pid

    return new_pid


def next_mask(constraint: Constraint) -> np.ndarray:
    return constraint.mask.result(PATIENCE_S)


def allowed_by(constraint: Constraint) -> list[int]:
    bits = np.unpackbits(next_mask(constraint).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def error_of(constraint: Constraint) -> BaseException | None:
    return constraint.mask.exception(PATIENCE_S)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def end(processes: GrammarProcesses) -> None:
    """End the host; the processes end with pytest."""
    processes._host._process.kill()
    processes._host._process.wait()


def yields(thread: int) -> bool:
    """Return whether a thread runs only on cores that are idle otherwise."""
    return os.sched_getscheduler(thread) == os.SCHED_IDLE


def host_pid(processes: GrammarProcesses) -> int:
    return processes._host._process.pid


def assert_serves(begin, text: str = "ab?") -> None:
    """Assert that a grammar that no test has used yet is compiled and followed."""
    constraint = begin(regex(f"{text}c{{{next(NEW)}}}"))
    assert len(allowed_by(constraint)) == 1


NEW = iter(range(1, 1000))


def test_masks_match_those_of_the_library(model, begin):
    folder, ids, vocab_size = model
    grammar = regex("(-{60,70}|a[bc]+)x?")
    compiled = compile_text(make_library(folder, vocab_size, frozenset({ids["</s>"]})), grammar)
    for text in ([ids["-" * 64], ids["-"]], [ids["a"], ids["c"], ids["x"], ids["</s>"]]):
        constraint, state = begin(grammar), GrammarState(compiled)
        for length, token_id in enumerate(text):
            assert allowed_by(constraint) == allowed_ids(state, vocab_size)
            assert allowed_by(begin(grammar, text[:length])) == allowed_by(constraint)
            constraint.accept(token_id)
            state.accept(token_id)
        assert allowed_by(constraint) == allowed_ids(state, vocab_size)


def test_token_that_violates_the_grammar_is_reported(model, begin):
    _, ids, _ = model
    constraint = begin(regex("abc"), [ids["a"]])
    next_mask(constraint)
    with pytest.raises(GrammarViolated, match=f"token {ids['x']} at index 1 "):
        constraint.accept(ids["x"])
    assert allowed_by(constraint) == [ids["b"]]
    error = error_of(begin(regex("abc"), [ids["a"], ids["b"], ids["x"], ids["c"]]))
    assert isinstance(error, GrammarViolated)
    assert (error.token_id, error.index) == (ids["x"], 2)
    assert allowed_by(constraint) == [ids["b"]]


def test_invalid_grammar_is_refused_with_the_reason(begin):
    error = error_of(begin(regex("[a")))
    assert isinstance(error, InvalidRequest)
    assert "regular expression cannot be used" in str(error)
    assert_serves(begin)


def follow(constraint: Constraint, token_ids: list[int]) -> BaseException | None:
    """Accept the first token of these that is allowed, as often as possible; return the error."""
    while (error := error_of(constraint)) is None:
        allowed = set(allowed_by(constraint))
        if (token_id := next((each for each in token_ids if each in allowed), None)) is None:
            break
        constraint.accept(token_id)
    return error


def test_three_endless_grammars_leave_room_for_the_next(processes, begin):
    processes.limits = Limits(compile_s=0.2)
    text = ENDLESS["ambiguous counts"].text
    for constraint in [begin(ebnf(text.replace("99", f"{most}"))) for most in (97, 98, 99)]:
        error = error_of(constraint)
        assert isinstance(error, InvalidRequest)
        assert "too much time or memory" in str(error)
    processes.limits = Limits()
    assert_serves(begin)


@pytest.mark.parametrize("name", sampled(ENDLESS, "nested empty repetition", "ambiguous"))
def test_answer_to_an_endless_grammar_fails_alone(name, model, processes, begin):
    ids = model[1]
    other = begin(regex("[a-z]*"))
    next_mask(other)
    processes.limits = Limits(masks_s=0.2, cpu_s=0.2, cpu_per_token_s=0.0)
    error = follow(begin(ENDLESS[name]), [ids["-" * 64], ids["-"]])
    assert isinstance(error, InvalidRequest)
    assert "too much time or memory" in str(error)
    other.accept(ids["a"])
    assert ids["b"] in allowed_by(other)
    processes.limits = Limits()
    assert_serves(begin)


def test_answer_may_be_slow_for_a_moment_but_not_on_average(model, processes, begin):
    ids = model[1]
    processes.limits = Limits(cpu_s=0.1, cpu_per_token_s=1.0)
    patient = begin(regex("a{0,999}"))
    assert follow(patient, [ids["a"]]) is None
    processes.limits = Limits(cpu_s=1e-6, cpu_per_token_s=0.0)
    assert isinstance(follow(begin(regex("b{0,999}")), [ids["b"]]), InvalidRequest)


def test_grammar_that_needs_too_much_memory_fails(model, processes, begin):
    processes.limits = Limits(memory_bytes=1 << 20, compile_s=60, masks_s=60, cpu_s=60)
    large = " | ".join(f'"{number}" [a-z]{{{number}}}' for number in range(300))
    error = error_of(begin(ebnf(f"root ::= {large}")))
    assert isinstance(error, InvalidRequest)
    assert "too much time or memory" in str(error)
    # Not the grammar of another test, which would be refused there for a minute.
    grammar = ebnf(ENDLESS["counts of rules"].text.replace("999", "998"))
    growing = follow(begin(grammar), [model[1]["-"]])
    assert isinstance(growing, InvalidRequest)
    assert "too much time or memory" in str(growing)
    processes.limits = Limits()
    assert_serves(begin)


def test_slow_compilation_yields_to_the_engine_but_the_masks_after_it_do_not(processes, begin):
    assert_serves(begin)  # starts the host
    processes.limits = Limits(compile_s=PATIENCE_S)
    others = set(children(host_pid(processes)))
    constraint = begin(ebnf(ENDLESS["ambiguous counts"].text.replace("99", "96")))

    def threads() -> list[tuple[int, int]]:
        pids = set(children(host_pid(processes))) - others
        return [(pid, int(name)) for pid in pids for name in os.listdir(f"/proc/{pid}/task")]

    until(lambda: any(yields(thread) for _, thread in threads()))
    assert [thread for pid, thread in threads() if yields(thread) == (pid == thread)] == []
    (pid,) = {pid for pid, _ in threads()}
    os.kill(pid, signal.SIGKILL)
    assert isinstance(error_of(constraint), EngineFailed)


def test_compilation_that_gets_no_core_in_time_is_refused_as_overload(processes, begin):
    assert_serves(begin)  # starts the host
    processes.limits = Limits(wait_s=0.2, compile_s=PATIENCE_S)
    others = children(host_pid(processes))
    grammar = ebnf(ENDLESS["ambiguous counts"].text.replace("99", "95"))
    assert isinstance(error_of(begin(grammar)), Overloaded)
    until(lambda: set(children(host_pid(processes))) <= set(others))
    processes.limits = Limits()
    assert_serves(begin)


def test_process_with_slow_masks_yields_to_the_engine(model, processes, begin):
    processes.limits = Limits(masks_s=PATIENCE_S, cpu_s=PATIENCE_S)
    constraint = begin(ENDLESS["counts of rules"])
    next_mask(constraint)
    constraint.accept(model[1]["-" * 64])
    pids = children(host_pid(processes))
    until(lambda: any(map(yields, pids)))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert isinstance(error_of(constraint), EngineFailed)


def test_process_that_waits_for_a_core_keeps_its_priority(
    model, processes, begin, new_pid, monkeypatch
):
    monkeypatch.setattr(module, "_CHECK_S", 0.01)
    constraint = begin(regex("[g-k]*"))
    next_mask(constraint)
    checks = threading.Semaphore(0)
    cpu_s = module._Link._cpu_s
    monkeypatch.setattr(module._Link, "_cpu_s", lambda link: (checks.release(), cpu_s(link))[1])
    os.kill(new_pid(), signal.SIGSTOP)
    try:
        constraint.accept(model[1]["g"])
        for _ in range(100):
            assert checks.acquire(timeout=PATIENCE_S)
    finally:
        os.kill(new_pid(), signal.SIGCONT)
    next_mask(constraint)
    assert not yields(new_pid())


# The error after a signal, and the cause and the level that are logged.
SIGNALS = {
    "SIGKILL": (EngineFailed, ("signal 9", "error")),  # an operator, or the kernel lacks memory
    "SIGUSR1": (EngineFailed, ("signal 10", "error")),
    "SIGSEGV": (InvalidRequest, ("signal 11", "warning")),  # the grammar's fault
    "SIGABRT": (InvalidRequest, ("signal 6", "warning")),
    "SIGALRM": (InvalidRequest, None),  # the limit of time
}


def is_stopped(pid: int) -> bool:
    """Return whether all threads of a process have stopped."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("is_running", [False, True])
def test_signal_that_ends_a_process_decides_the_error(
    is_running, name, model, processes, begin, new_pid
):
    grammar = regex(f"[a-f]*{name}{next(NEW)}")
    constraint = begin(grammar)
    next_mask(constraint)
    with capture_logs() as logs:
        if is_running:
            os.kill(new_pid(), signal.SIGSTOP)
            until(lambda: is_stopped(new_pid()))
            constraint.accept(model[1]["a"])
        os.kill(new_pid(), getattr(signal, name))
        if is_running:
            os.kill(new_pid(), signal.SIGCONT)
        else:
            until(lambda: not Path(f"/proc/{new_pid()}").exists())
            constraint.accept(model[1]["a"])
        error = error_of(constraint)
    kind, logged = SIGNALS[name]
    assert type(error) is kind
    assert error.is_retryable == (kind is EngineFailed)
    ends = [(each["kind"], (each["cause"], each["log_level"])) for each in logs]
    assert ends == ([("regex", logged)] if logged else [])
    assert len(allowed_by(begin(grammar))) == 7  # in a new process


@pytest.mark.thorough  # starts a host
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_host_that_died_or_hangs_is_replaced(number, processes, begin):
    assert_serves(begin)
    host = processes._host
    os.kill(host._process.pid, number)
    processes.limits = Limits(start_s=0.1)
    with capture_logs() as logs:
        assert isinstance(error_of(begin(regex(f"{number}"))), EngineFailed)
    assert [each["event"] for each in logs] == ["grammar.host_failed"]
    assert host.has_ended
    processes.limits = Limits()
    assert_serves(begin)


@pytest.mark.thorough  # starts a host
def test_answers_outlive_the_host_and_a_process_without_host_is_a_fault(
    model, processes, begin, new_pid
):
    constraint = begin(regex("[l-p]*"))
    next_mask(constraint)
    new_pid()
    end(processes)
    constraint.accept(model[1]["m"])
    next_mask(constraint)
    os.kill(new_pid(), signal.SIGKILL)
    constraint.accept(model[1]["m"])
    assert type(error_of(constraint)) is EngineFailed
    assert_serves(begin)


@pytest.mark.thorough  # starts a host
def test_bug_in_a_process_is_logged_with_its_traceback(model, capfd):
    folder, ids, vocab_size = model
    logging = {"log_format": "json", "role": "decode"}
    made = GrammarProcesses(folder, vocab_size, frozenset({ids["</s>"]}), logging)
    error = error_of(made.open(regex("a*"), ["no id"], lambda: None))
    end(made)
    assert type(error) is EngineFailed
    assert "using the grammar failed: " in str(error)
    (line,) = [each for each in capfd.readouterr().err.splitlines() if "process_ended" in each]
    fields = read_line(line)
    assert fields is not None
    assert (fields["role"], fields["kind"], fields["level"]) == ("decode", "regex", "error")
    assert "Traceback" in fields["exception"]


def test_refused_grammar_is_not_compiled_again_for_some_time(processes, begin, monkeypatch):
    processes.limits = Limits(compile_s=0.1)
    grammar = ebnf(ENDLESS["ambiguous counts"].text.replace("99", "96"))
    refusals = [error_of(begin(grammar))]
    process = processes._processes[grammar]
    refusals += [error_of(begin(grammar)) for _ in range(9)]
    assert all("too much time or memory" in str(each) for each in refusals)
    assert processes._processes[grammar] is process
    monkeypatch.setattr(process, "_refused_until_s", time.monotonic())
    error_of(begin(grammar))
    assert processes._processes[grammar] is not process


def test_refused_grammar_gives_up_its_place_first(processes, begin, monkeypatch):
    monkeypatch.setattr(module, "_MAX_PROCESSES", 2)
    gc.collect()
    unused, refused = regex("unused"), regex("[refused")
    next_mask(begin(unused))
    assert isinstance(error_of(begin(refused)), InvalidRequest)
    gc.collect()
    assert_serves(begin)
    assert unused in processes._processes
    assert refused not in processes._processes


def test_unused_processes_make_room_and_used_ones_do_not(processes, begin, monkeypatch):
    monkeypatch.setattr(module, "_MAX_PROCESSES", 2)
    gc.collect()
    used = begin(regex("used"))
    assert len(allowed_by(used)) == 1
    for _ in range(3):
        assert_serves(begin)
    other = begin(regex("other"))
    next_mask(other)
    assert isinstance(error_of(begin(regex("third"))), Overloaded)
    other.close()
    assert_serves(begin)
    assert len(allowed_by(begin(regex("used")))) == 1
    assert len(processes._processes) <= 2


def test_process_is_reused_until_its_place_is_needed(processes, begin):
    grammar = regex("reused[0-9]")
    next_mask(begin(grammar))
    process = processes._processes[grammar]
    gc.collect()
    assert process.is_idle
    next_mask(begin(grammar))
    assert processes._processes[grammar] is process


def test_grammar_that_waits_too_long_for_a_place_is_refused(processes, begin):
    processes.limits = Limits(wait_s=0.01)
    places = [processes._compiling.acquire() for _ in range(3)]
    try:
        assert isinstance(error_of(begin(regex("waits"))), Overloaded)
    finally:
        for _ in places:
            processes._compiling.release()
    processes.limits = Limits()
    assert len(allowed_by(begin(regex("waits")))) == 1


def test_cancelled_grammar_keeps_its_place_until_it_is_compiled(processes, begin, monkeypatch):
    monkeypatch.setattr(module, "_MAX_PROCESSES", 1)
    gc.collect()
    places = [processes._compiling.acquire() for _ in range(3)]
    try:
        begin(regex("cancelled")).close()
        assert isinstance(error_of(begin(regex("refused"))), Overloaded)
    finally:
        for _ in places:
            processes._compiling.release()
    until(lambda: processes._processes[regex("cancelled")].is_idle)
    assert_serves(begin)


def test_answer_that_ends_with_a_pending_token_is_forgotten(model, processes, begin):
    constraint = begin(regex("forgotten?"))
    next_mask(constraint)
    process = processes._processes[regex("forgotten?")]
    with process._changed:  # the process's thread cannot take the token before the end
        constraint.accept(model[1]["f"])
        constraint.close()
        assert process._token_ids == {}
    assert process.is_idle


def test_each_mask_wakes_the_engine(model, processes):
    woken = threading.Semaphore(0)
    constraint = processes.open(regex("ab"), [], woken.release)
    assert woken.acquire(timeout=PATIENCE_S)
    constraint.accept(model[1]["a"])
    assert woken.acquire(timeout=PATIENCE_S)


ENGINE = """
import os, sys
from pathlib import Path
from tandem.engine.grammar.processes import GrammarProcesses
from tandem.wire.generation import Grammar

made = GrammarProcesses(Path(sys.argv[1]), int(sys.argv[2]), frozenset({int(sys.argv[3])}))
constraint = made.open(Grammar(kind="regex", text="ab"), [], lambda: None)
constraint.mask.result()
print(made._host._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.thorough  # starts a host
def test_processes_end_with_their_engine(model):
    folder, ids, vocab_size = model
    command = [sys.executable, "-c", ENGINE, str(folder), str(vocab_size), str(ids["</s>"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        host = int(engine.stdout.readline())
        pids = [host, *children(host)]
        assert len(pids) == 2
        engine.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
