#!/usr/bin/env python3
"""lm-evaluation-harness, `local-completions`: choices by log-likelihood, and text until a stop.

Its tasks are made here, since its own load data sets from a hub.
"""

import json

from client import Failed, Target, expect, main, version

# In each item the more likely answer comes first.
QUESTIONS = [
    ("The capital of France is", " Paris", " a banana"),
    ("Two plus two is", " four", " house"),
    ("Cats and", " dogs", " the of of"),
]
TASK = """task: tandem_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
output_type: {kind}
"""
CHOOSE = """doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
SAY = """doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def check(target: Target) -> tuple[str, str]:
    needs = ["torch==2.13.0", "lm-eval[api]==0.4.13", "transformers"]
    python = target.python("lm_eval", ["install", *needs])
    data = target.out / "data.jsonl"
    rows = [{"question": question, "choices": choices} for question, *choices in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, rest in (("choose", "multiple_choice", CHOOSE), ("say", "generate_until", SAY)):
        task = TASK.format(name=name, data=data, kind=kind) + rest
        (target.out / f"{name}.yaml").write_text(task)
    target.run(
        *(python, "-m", "lm_eval", "--model", "local-completions"),
        "--model_args",
        f"model={target.model},base_url={target.url}/v1/completions,tokenizer={target.tokenizer},"
        "tokenizer_backend=huggingface,num_concurrent=2",
        *("--include_path", str(target.out), "--tasks", "tandem_choose,tandem_say"),
        *("--output_path", str(target.out / "results"), "--log_samples"),
    )
    [path] = target.out.glob("results/**/results_*.json")
    accuracy = json.loads(path.read_text())["results"]["tandem_choose"]["acc,none"]
    expect("accuracy of easy choices", accuracy, 1.0)
    [path] = target.out.glob("results/**/samples_tandem_say_*.jsonl")
    said = [json.loads(line)["resps"][0][0] for line in path.read_text().splitlines()]
    expect("texts", len(said), len(QUESTIONS))
    if not all(said) or any("." in text for text in said):
        raise Failed(f"texts until a full stop: {said}")
    seen = f"{2 * len(QUESTIONS)} log-likelihoods, {len(said)} texts, accuracy {accuracy}"
    return version(python, "lm_eval"), seen


main("lm_eval", check)
