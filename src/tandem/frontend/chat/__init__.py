"""Request parsing that all APIs share: prompts, sampling parameters, grammars, tools."""
