import introspect
from introspect import catalog


def rows(**options):
    return introspect.analyze("models", **options).tables["models"].rows


def test_every_entry_is_a_row():
    found = rows()
    assert [row["id"] for row in found] == [entry.id for entry in catalog.entries()]
    assert list(found[0])[:5] == ["id", "class", "params", "source", "aliases"]


def test_a_row_says_what_the_catalog_does():
    (row,) = rows(search="meta-llama/Llama-3.1-8B")
    assert row["id"] == "meta-llama/Meta-Llama-3.1-8B"
    assert row["class"] == "LlamaForCausalLM"
    assert row["params"] == 8_030_261_248
    assert row["source"].startswith("ai-dynamo/aiconfigurator:")
    assert row["aliases"] == "meta-llama/Llama-3.1-8B"


def test_search_looks_in_ids_aliases_classes_and_model_types():
    assert {row["id"] for row in rows(search="COHERELABS")} == {"CohereForAI/c4ai-command-r-v01"}
    assert {row["class"] for row in rows(search="GptOssFor")} == {"GptOssForCausalLM"}
    assert {row["class"] for row in rows(search="glm_moe_dsa")} == {"GlmMoeDsaForCausalLM"}


def test_nothing_found_names_the_nearest():
    result = introspect.analyze("models", search="mixtrall-8x7b")
    assert result.tables["models"].rows == ()
    (note,) = result.notes
    assert note.startswith("no built-in model matches 'mixtrall-8x7b'; did you mean mistralai/Mixtral-8x7B-v0.1 or ")
    assert introspect.analyze("models", search="zzzz").notes == ("no built-in model matches 'zzzz'",)


def test_the_result_has_no_model():
    assert introspect.analyze("models").to_dict()["model"] is None
