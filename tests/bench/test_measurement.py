"""What bench.json holds."""

import json

from specdraft.bench.measurement import loads_of, measurement
from tests.bench.written import CONTENDERS, FOUR, ONE, three

SETTINGS = {"objective": {"ttft_ms": 100.0, "tpot_ms": None}, "price_per_hour": 2.0, "target": "tiny"}


def test_every_contender_at_every_load_as_json():
    found = json.loads(json.dumps(measurement(three(), CONTENDERS, SETTINGS, target="a/b")))
    assert len(found["results"]) == 6 and len(found["categories"]) == 4 and len(found["advice"]) == 2
    assert found["results"][2]["speedup"] == 2.0 and [*found["engine_settings"]] == [
        "vllm.yaml",
        "vllm-1.yaml",
        "vllm-4.yaml",
    ]
    assert all("model: a/b" in text for text in found["engine_settings"].values())
    at_four = found["engine_settings"]["vllm-4.yaml"]
    assert "At 4 requests" in at_four and "At 1 request" not in at_four and "num_speculative_tokens: 1\n" in at_four
    assert not any("dtype" in text for text in found["engine_settings"].values())
    chosen = measurement(three(), CONTENDERS, SETTINGS, target="a/b", dtype="float32")["engine_settings"]
    assert all("dtype: float32\n" in text for text in chosen.values())
    assert measurement(three(), CONTENDERS, SETTINGS)["engine_settings"] == {}
    told = SETTINGS | {"chat_template_options": {"enable_thinking": False}}
    chosen = measurement(three(), CONTENDERS, told, target="a/b")["engine_settings"]
    assert all("default-chat-template-kwargs:\n  enable_thinking: false\n" in text for text in chosen.values())


def test_one_contender_alone_has_latencies_and_nothing_to_compare():
    own = [block for block in three() if block.contender == "eagle3 K=1"]
    found = measurement(own, CONTENDERS[1:2], SETTINGS)
    assert found["advice"] == [] and found["categories"] == [] and found["results"][0]["ttft_ms"]["p50"] > 0


def test_loads():
    assert loads_of([1, 4], []) == [ONE, FOUR] and str(loads_of([], [0.5])[0]) == "0.5 requests a second"
