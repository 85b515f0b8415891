"""An evaluation as evaluation.json holds it, with everything that a report can show and names that do not break."""


def result(drafter, temperature, category=None):
    row = {
        "drafter": drafter,
        "label": drafter,
        "temperature": temperature,
        "drafting": "greedy",
        "beside": False,
        "requests": 4,
        "num_draft_tokens": 3,
        "rounds": 10,
        "accepted_per_position": [6, 4, 1],
        "conditional_acceptance_rate": [0.6, 0.66, 0.25],
        "conditional_acceptance_interval": [[0.5, 0.7], [0.4, 0.8], None],
        "draft_acceptance_rate": 0.36,
        "tokens_per_second": 120.5,
        "cost_ratio": 0.1,
        "verification_cost_ratio": 1.2,
        "nodes_per_round": 3.0,
        "differences": None,
        "lossless": None,
        "divergence": None,
    }
    for name in ("acceptance_length", "acceptance_length_per_request", "speedup"):
        row |= {name: 2.1, f"{name}_interval": [1.8, 2.4]}
    return row | ({} if category is None else {"category": category})


def evaluation(drafter="eagle3", run="a"):
    predictions = [
        {"batch_size": size, "draft": f"{kind} of {k}", "kind": kind, "tokens": k, "speedup": 1.1 + 0.1 * k / size}
        for size in (1, 4)
        for kind in ("chain", "tree")
        for k in (1, 2, 3)
    ]
    models = [{"drafter": drafter, "temperature": t, "predictions": predictions} for t in (0.0, 1.0)]
    check = {"drafter": drafter, "temperature": 0.0, "draft": "chain of 3", "tokens": 3, "speedup": 1.3}
    long = "a_name_without_any_place_to_break_" * 6
    sample = {
        "drafter": drafter,
        "temperature": 0.0,
        "category": "code",
        "question": f"def {long}():",
        "segments": [{"text": f"return {long}", "status": "accepted"}, {"text": "<no>", "status": "rejected"}],
    }
    names = [drafter, "prompt_lookup"]
    settings = {
        "target": {"name": f"organization/{long}"},
        "checkpoint": f"/runs/{run}/drafter",
        "benchmark": "b.jsonl",
    }
    settings |= {"prompts": 4, "max_new_tokens": 16, "draft_tree": "chain of 3", "rule": "rejection sampling"}
    settings |= {"drafting": "greedy", "engine": "vllm"}
    return {
        "created": "2026-01-02",
        "settings": settings | {"dtype": "float32", "device": "cpu", "temperatures": [0.0, 1.0]},
        "machine": {"processor": long},
        "versions": {"torch": "2"},
        "baseline": [{"temperature": t, "distinct_4gram": 0.9, "tokens_per_second": 60.0} for t in (0.0, 1.0)],
        "results": [result(name, t) for t in (0.0, 1.0) for name in names],
        "categories": [result(name, t, c) for t in (0.0, 1.0) for c in ("code", "chat") for name in names],
        "cost_models": models,
        "checks": [check],
        "advice": [{"drafter": drafter, "sentence": "Draft 3 tokens.", "vllm": f"--speculative-config '{{{long}}}'"}],
        "samples": [sample],
    }
