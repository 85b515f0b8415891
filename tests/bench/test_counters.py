"""What engines count, as they write it."""

from specdraft.bench.counters import Counters, parse, read_counters

TEXT = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",num_gpu_blocks="40",name="a \\"b\\", c"} 1.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 30.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="tiny"} 10.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} 90.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 25.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 1.0
"""


def test_ranks_are_summed_and_positions_put_in_order():
    assert parse(TEXT) == Counters(40.0, 90.0, 25.0, (21.0, 5.0), 640)
    assert parse(TEXT.replace("block_size", 'kv_cache_size_tokens="700",block_size')).cache_tokens == 700


def test_what_was_counted_in_between():
    later = Counters(50.0, 120.0, 40.0, (30.0, 9.0, 1.0), 640)
    assert later.since(parse(TEXT)) == Counters(10.0, 30.0, 15.0, (9.0, 4.0, 1.0), 640)


def test_a_server_without_counters(world):
    assert read_counters(world(per_round=3).url) == Counters(cache_tokens=1400, per_position=(0.0, 0.0))
    assert read_counters("http://127.0.0.1:9") is None
