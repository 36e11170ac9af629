import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from tandem.engine.config import EngineConfig, EngineOptions
from tandem.node.models.checkpoint import model_name, resolve_model
from tandem.node.models.hub import HubModel, download, hub_model, reason_of
from tandem.wire.errors import ConfigInvalid
from tests.hub_server import serving_hub
from tests.patience import until


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub without repositories and an empty cache, used by child processes."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield hub


@pytest.fixture
def sharded(tiny_model, tmp_path):
    """A model in two shards, with additional weight files that transformers does not load."""
    path = shutil.copytree(tiny_model("llama"), tmp_path / "sharded")
    tensors = sorted(load_file(path / "model.safetensors").items())
    shards = {"one.safetensors": dict(tensors[:9]), "two.safetensors": dict(tensors[9:])}
    for name, part in shards.items():
        save_file(part, path / name, {"format": "pt"})
    names = {tensor: name for name, part in shards.items() for tensor in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (path / "model.safetensors").rename(path / "consolidated.safetensors")
    for name in ("pytorch_model.bin", "README.md", "modeling_tiny.py"):
        (path / name).write_bytes(b"x")
    return path


def refusal(model, tmp_path, settings=None) -> str:
    with pytest.raises(ConfigInvalid) as raised:
        resolve_model(model, tmp_path, settings or EngineOptions())
    assert "\n" not in raised.value.message
    return raised.value.message


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("org/name", HubModel(repo="org/name")),
        ("Org-1/na.me_7B@v1.0", HubModel(repo="Org-1/na.me_7B", revision="v1.0")),
        ("org/name@refs/pr/3", HubModel(repo="org/name", revision="refs/pr/3")),
        ("org/name:Q4_K_M", HubModel(repo="org/name", gguf="Q4_K_M")),
        ("org/name:a-Q8_0.gguf@main", HubModel(repo="org/name", gguf="a-Q8_0.gguf")),
        *((path, None) for path in ("/org/name", "./name", "~/name", "name", "org/name/")),
        *(
            (path, None)
            for path in ("a/b/c", "org/name/file.gguf", "models/file.gguf", "org/ name")
        ),
    ],
)
def test_hub_name_has_one_slash_and_does_not_look_like_a_path(given, meant):
    assert hub_model(given) == meant


def test_existing_path_takes_precedence_over_a_hub_name(tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/name") is None
    assert model_name("org/name") == "name"


def test_model_name_for_clients_omits_the_revision():
    assert model_name("org/name@v1") == "org/name"
    assert model_name("org/name:Q4_K_M") == "org/name:Q4_K_M"


def test_only_needed_files_are_downloaded_and_only_once(hub, sharded, tmp_path):
    hub.add_directory("org/model", sharded)
    template = "additional_chat_templates/tool_use.jinja"
    hub.repositories["org/model"].commits["main"] |= {
        "original/model.safetensors": b"x",
        "original/config.json": b"x",
        template: b"x",
    }
    with capture_logs() as logs:
        path = resolve_model("org/model", tmp_path)
    needed = {"config.json", "generation_config.json", "model.safetensors.index.json", template}
    assert set(hub.gets) == {*needed, "one.safetensors", "two.safetensors"}
    (resolved,) = (line for line in logs if line["event"] == "model.resolved")
    assert resolved["commit"] == path.name == hub.repositories["org/model"].commit("main")
    (began,) = (line for line in logs if line["event"] == "model.downloading")
    assert (began["model"], began["percent"]) == ("org/model", 0)
    assert resolve_model("org/model", tmp_path) == path
    assert set(hub.gets.values()) == {1}


@pytest.mark.cluster
def test_weights_and_code_are_downloaded_only_if_used(hub, sharded, tmp_path):
    hub.add_directory("org/model", sharded)
    hub.repositories["org/model"].commits["main"]["other/model.py"] = b"x"
    settings = EngineOptions(load_format="dummy", trust_remote_code=True)
    resolve_model("org/model", tmp_path, settings)
    assert "modeling_tiny.py" in hub.gets
    assert "other/model.py" not in hub.gets
    assert not any(name.endswith(".safetensors") for name in hub.gets)


@pytest.mark.cluster
def test_two_nodes_of_one_machine_download_once(hub, sharded):
    hub.add_directory("org/model", sharded)
    hub.pauses["one.safetensors"] = threading.Event()
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(download, HubModel(repo="org/model")) for _ in range(2)]
        until(lambda: hub.num_resolved == 2 and hub.gets["one.safetensors"])
        hub.pauses["one.safetensors"].set()
        assert nodes[0].result() == nodes[1].result()
    assert set(hub.gets.values()) == {1}


@pytest.mark.cluster
def test_broken_download_connection_is_resumed(hub, sharded, tmp_path):
    hub.add_directory("org/model", sharded)
    hub.breaks.add("one.safetensors")
    path = resolve_model("org/model", tmp_path)
    assert hub.gets["one.safetensors"] == 2
    assert (path / "one.safetensors").read_bytes() == (sharded / "one.safetensors").read_bytes()


@pytest.mark.cluster
def test_stopped_download_exits_immediately_and_keeps_complete_files(hub, sharded, tmp_path):
    hub.add_directory("org/model", sharded)
    hub.pauses["two.safetensors"] = threading.Event()
    order = msgspec.json.encode(HubModel(repo="org/model"))
    command = [sys.executable, "-P", "-m", "tandem.node.models.hub", order]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        until(
            lambda: (
                any((tmp_path / "hf").glob("hub/*/snapshots/*/one.safetensors"))
                and any((tmp_path / "hf").rglob("*.incomplete"))
            )
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1
    hub.pauses.pop("two.safetensors").set()
    assert not any((tmp_path / "hf").rglob("*.incomplete"))
    resolve_model("org/model", tmp_path)
    assert (hub.gets["one.safetensors"], hub.gets["two.safetensors"]) == (1, 2)


@pytest.mark.cluster
def test_moved_revision_is_followed_and_old_commits_stay_available(hub, sharded, tmp_path):
    hub.add_directory("org/model", sharded)
    before = resolve_model("org/model", tmp_path)
    hub.add_directory("org/model", sharded, revision="v1")
    hub.add_directory("org/model", sharded, without=("generation_config.json",))
    after = resolve_model("org/model", tmp_path)
    assert after != before
    assert resolve_model(f"org/model@{before.name}", tmp_path) == before
    assert resolve_model("org/model@v1", tmp_path) == before


@pytest.mark.cluster
def test_cached_model_is_served_without_the_hub(hub, sharded, tmp_path, monkeypatch):
    hub.add_directory("org/model", sharded)
    hub.add("org/other", {"config.json": b"{}"})
    path = resolve_model("org/model", tmp_path)
    hub.status = 503
    assert resolve_model("org/model", tmp_path) == path
    said = refusal("org/other", tmp_path)
    assert f"{hub.url} answers with status 503 for org/other" in said
    # Port 9 (discard), on which nothing listens.
    monkeypatch.setenv("HF_ENDPOINT", "http://me:s3cret@127.0.0.1:9")
    assert resolve_model("org/model", tmp_path) == path
    said = refusal("org/other", tmp_path)
    assert "http://127.0.0.1:9 cannot be reached" in said
    assert "HF_ENDPOINT" in said
    assert "s3cret" not in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("org/model", tmp_path) == path
    said = refusal("org/other", tmp_path)
    assert f"{tmp_path}/hf/hub lacks files of org/other" in said
    assert "HF_HUB_OFFLINE" in said


def test_gated_model_needs_a_token(hub, sharded, tmp_path, monkeypatch):
    hub.add_directory("org/model", sharded, token="hf_right")
    said = refusal("org/model", tmp_path)
    assert f"accept its licence at {hub.url}/org/model" in said
    assert "HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    resolve_model("org/model", tmp_path)


def test_unknown_name_or_revision_is_rejected_with_both_searched_places(hub, sharded, tmp_path):
    hub.add_directory("org/model", sharded)
    said = refusal("models/llama", tmp_path)
    assert "models/llama is neither a path on this machine nor a public model" in said
    assert hub.url in said
    assert f"org/model has no revision v9 at {hub.url}" in refusal("org/model@v9", tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("config.json", "pytorch_model.bin"), "only pickled weights"),
        (("config.json", "README.md"), "has no model.safetensors"),
        (("config.json", "adapter_config.json", "adapter_model.safetensors"), "a LoRA adapter"),
        (
            ("training_args.bin", "a-Q4_K_M.gguf", "a-Q8_0.gguf"),
            "such as org/model:a-Q4_K_M.gguf, org/model:a-Q8_0.gguf",
        ),
    ],
)
def test_unusable_repository_is_rejected_with_the_reason(hub, tmp_path, files, words):
    hub.add("org/model", dict.fromkeys(files, b"{}"))
    assert words in refusal("org/model", tmp_path)


def test_python_code_of_a_repository_needs_trust_remote_code(hub, sharded, tmp_path):
    pytest.importorskip("torch")
    from tandem.engine.model.checkpoint import read_config

    facts = json.loads((sharded / "config.json").read_text())
    changed = facts | {"model_type": "tiny", "auto_map": {"AutoConfig": "modeling_tiny.Tiny"}}
    (sharded / "config.json").write_text(json.dumps(changed))
    hub.add_directory("org/model", sharded)
    path = resolve_model("org/model", tmp_path)
    with pytest.raises(ConfigInvalid, match="--trust-remote-code"):
        read_config(EngineConfig(model_dir=str(path)))


@pytest.mark.parametrize("name", ["org/model:q4_k_m", "org/model:a-Q4_K_M.gguf"])
def test_gguf_file_is_selected_by_quantization_or_full_name(hub, name):
    names = ("config.json", "README.md", "a-Q4_K_M.gguf", "a-Q8_0.gguf")
    hub.add("org/model", dict.fromkeys(names, b"{}"))
    assert download(hub_model(name)).name == "a-Q4_K_M.gguf"
    assert "a-Q8_0.gguf" not in hub.gets


@pytest.mark.parametrize("name", ["org/model:Q4_K_M", "org/model:a-Q4_K_M-00001-of-00002.gguf"])
def test_split_gguf_file_is_rejected_before_the_download(hub, tmp_path, name):
    parts = [f"a-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub.add("org/model", dict.fromkeys([*parts, "a-Q8_0.gguf"], b"{}"))
    assert "llama-gguf-split --merge a-Q4_K_M-00001-of-00002.gguf" in refusal(name, tmp_path)
    assert not {*parts} & {*hub.gets}


@pytest.mark.parametrize("name", ["org/model:Q4_K_M", "org/model:a-Q4_K_M-00001-of-00001.gguf"])
def test_gguf_file_of_a_single_part_is_downloaded(hub, name):
    file = "a-Q4_K_M-00001-of-00001.gguf"
    hub.add("org/model", dict.fromkeys([file, "a-Q8_0.gguf"], b"{}"))
    assert download(hub_model(name)).name == file


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EACCES, "correct its permissions"),
        (errno.EIO, "start again"),
    ],
)
def test_disk_error_is_reported_with_a_remedy(number, words):
    told = reason_of(OSError(number, os.strerror(number)), HubModel(repo="org/model"))
    assert words in told
