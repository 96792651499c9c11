import csv
import json
import re
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest

from introspect import catalog
from introspect.sources import resolve

SHARED = Path(__file__).parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared folder is not beside this checkout")

USED_BY_GOLDENS = [
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-235B-A22B",
    "bigscience/bloom-7b1",
    "deepseek-ai/DeepSeek-V3",
    "google/gemma-2-2b",
    "google/gemma-2b",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Meta-Llama-3-70B",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Meta-Llama-3.1-405B",
    "meta-llama/Meta-Llama-3.1-8B",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "openai/gpt-oss-20b",
]


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.id)
def test_every_row_is_valid(entry):
    data = catalog.read(entry.file)
    config = json.loads(data)
    assert sha256(data).hexdigest() == entry.sha256
    assert (config["architectures"][0], config["model_type"]) == (entry.architecture, entry.model_type)
    assert entry.fidelity in {"hf-mirror", "vendored-verbatim"}
    assert re.fullmatch(r"[\w.-]+/[\w.-]+:.+|public repository", entry.source)
    assert entry.class_name.isidentifier()
    assert entry.params > 0
    assert entry.quant_file is None or json.loads(catalog.read(entry.quant_file))


def test_every_name_means_one_model():
    names = [name.lower() for entry in catalog.entries() for name in entry.names]
    assert len(names) == len(set(names))


def test_every_file_belongs_to_a_row():
    used = {name for entry in catalog.entries() for name in (entry.file, entry.quant_file) if name}
    assert {file.name for file in (files("introspect") / "data" / "configs").iterdir()} == used


def test_entries_are_in_order_of_id():
    ids = [entry.id.lower() for entry in catalog.entries()]
    assert ids == sorted(ids)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
        ("meta-llama/Meta-Llama-3.1-405B", "meta-llama/Llama-3.1-405B"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3-8B"),
        ("CohereForAI/c4ai-command-r-v01", "CohereLabs/c4ai-command-r-v01"),
    ],
)
def test_both_spellings_of_a_renamed_repository(one, other):
    assert catalog.find(one) is catalog.find(other.upper()) is not None


@pytest.mark.parametrize("name", USED_BY_GOLDENS)
def test_the_models_of_the_goldens_are_built_in(name):
    assert resolve(name, offline=True).kind == "catalog"


def test_an_unknown_name_has_no_entry():
    assert catalog.find("meta-llama/Meta-Llama-3-8") is None


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("meta-llama/Meta-Llama-3-8", ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3.1-8B")),
        ("llama-3-8b", ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3.1-8B")),
        ("zzzz", ()),
    ],
)
def test_the_nearest_ids_come_first(name, nearest):
    assert catalog.nearest(name, count=2) == nearest


@needs_shared
def test_configs_are_byte_for_byte_those_of_the_shared_folder():
    for entry in catalog.entries():
        for file in filter(None, (entry.file, entry.quant_file)):
            assert catalog.read(file) == (SHARED / "models" / "configs" / file).read_bytes()


@needs_shared
def test_every_faithful_config_with_a_class_is_in_it():
    import transformers

    with open(SHARED / "models" / "MODELS.tsv", encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
    faithful = {
        row["file"]
        for row in rows
        if row["fidelity"] in {"hf-mirror", "vendored-verbatim"}
        and (row["parameters_meta"] or hasattr(transformers, row["architecture"]))
    }
    assert faithful - {entry.file for entry in catalog.entries()} == set()
    ids = {row["file"]: row["hub_id"] for row in rows}
    assert all(ids[entry.file] in {entry.id, ""} for entry in catalog.entries())


@needs_shared
def test_every_model_named_in_golden_tsv_is_in_it():
    text = (SHARED / "golden.tsv").read_text(encoding="utf-8")
    commands = [line.split("\t")[1] for line in text.splitlines() if line and not line.startswith("#")]
    models = {word for command in commands for word in command.split() if re.fullmatch(r"[\w-]+/[\w.-]+", word)}
    missing = {model for model in models if catalog.find(model) is None and not (SHARED.parent / model).exists()}
    assert missing == set()
