import pytest

from benchmarks.cpu_peers.table import ratios, render, rows

LARGE, SMALL = "qwen3-0.6b", "bundled"


def samples(model, figures):
    return {(model, *key.split()): values for key, values in figures.items()}


def goals(found):
    return {ratio.what: (ratio.value, ratio.goal) for ratio in found}


def test_each_precision_is_compared_with_the_format_of_its_bits():
    found = goals(
        ratios(
            samples(
                LARGE,
                {
                    "engine int8 decode_1": [30, 40, 50],
                    "engine int4 decode_1": [45],
                    "llama-bench Q8_0 decode_1": [32],
                    "llama-bench Q4_0 decode_1": [50],
                },
            )
        )
    )

    assert found == {
        "int8 alone / Q8_0 alone": (1.25, 1.0),
        "int4 alone / Q4_0 alone": (0.9, 0.9),
    }


def test_streams_and_prompts_are_compared_with_the_better_format():
    found = goals(
        ratios(
            samples(
                LARGE,
                {
                    "service int8 http_8": [150],
                    "engine int8 prefill_512": [200],
                    "llama-server Q8_0 http_8": [70],
                    "llama-server Q4_0 http_8": [75],
                    "llama-bench Q8_0 prefill_512": [160],
                    "llama-bench Q4_0 prefill_512": [100],
                },
            )
        )
    )

    assert found["int8, 8 streams / the better of Q8_0 and Q4_0, HTTP"] == (2.0, 2.0)
    assert found["int8, prompt of 512 / the better of Q8_0 and Q4_0"] == (1.25, 1.0)


def test_the_bundled_model_is_also_compared_with_transformers_and_with_itself():
    found = goals(
        ratios(
            samples(
                SMALL,
                {
                    "engine int8 decode_1": [300],
                    "engine int8 decode_8": [1500],
                    "transformers float32 decode_1": [100],
                    "llama-bench Q8_0 decode_1": [200],
                },
            )
        )
    )

    assert found == {
        "int8 alone / Q8_0 alone": (1.5, 1.2),
        "int8 alone / transformers": (3.0, 3.0),
        "int8, 8 streams / alone": (5.0, 4.0),
    }


def test_weights_without_quantization_have_no_goal_beside_llama_cpp():
    found = ratios(samples(LARGE, {"engine none decode_1": [5], "llama-bench BF16 decode_1": [20]}))

    assert goals(found) == {"none alone / BF16 alone": (0.25, None)}


def test_resident_memory_is_compared():
    found = ratios(
        samples(LARGE, {"service int8 rss_used": [900], "llama-server Q8_0 rss_used": [600]})
    )

    assert goals(found) == {"int8 / Q8_0, resident memory after the run": (1.5, None)}


def test_missing_figures_leave_out_their_ratios():
    assert ratios(samples(LARGE, {"engine int8 decode_1": [5]})) == []


def test_a_row_has_the_median_and_every_sample():
    (row,) = rows(samples(LARGE, {"engine int8 decode_1": [3, 1, 2]}))

    assert row["value"] == 2
    assert row["samples"] == [3, 1, 2]


@pytest.mark.parametrize(("value", "shown"), [(40, "1.25 | 1.0 |"), (16, "0.50 | 1.0 (missed) |")])
def test_the_table_shows_a_missed_goal(value, shown):
    found = ratios(
        samples(LARGE, {"engine int8 decode_1": [value], "llama-bench Q8_0 decode_1": [32]})
    )

    assert shown in render(found)


def test_the_same_file_is_compared_with_itself_alone():
    figures = {
        "engine Q4_K_M decode_1": [26],
        "llama-bench Q4_K_M decode_1": [20],
        "service Q4_K_M http_8": [50],
        "llama-server Q4_K_M http_8": [20],
        "llama-server Q8_0 http_8": [1000],
        "engine Q8_0 prefill_512": [5],
    }

    found = ratios(samples("smollm2", figures))

    assert goals(found) == {"Q4_K_M, alone": (1.3, 1.3), "Q4_K_M, 8 streams, HTTP": (2.5, 3.0)}
    assert "2.50 | 3.0 (missed)" in render(found)
