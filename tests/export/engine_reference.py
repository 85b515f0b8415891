"""What an engine does with an exported EAGLE-3 head, written from the format's description and nothing of ours.

Full re-computation at every step, no cache: row i is made of the feature of position i and the token at i + 1.
"""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """x: [heads, T, d], row t rotated by its position t."""
    d = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(0, d, 2) / d)  # [T, d/2]
    low, high = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)


@torch.no_grad()
def draft_like_vllm(config, tensors, model, prompt, first_token, num_tokens):
    """Greedily drafted target ids. ``model``: the transformers target; ``first_token``: what it emitted."""
    eps = config["rms_norm_eps"]
    states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    aux = [states[k][0] for k in config["eagle_aux_hidden_state_layer_ids"]]  # n x [T, H]
    if config["norm_before_fc"]:
        aux = rms_norm(torch.cat(aux, -1), tensors["input_norm.weight"], eps).chunk(len(aux), -1)
    if config["fc_norm"]:
        aux = [rms_norm(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(aux)]
    features = linear(torch.cat(aux, -1), tensors["fc.weight"])  # [T, H]
    tokens = [*prompt[1:], first_token]
    d2t = tensors.get("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
    embedding = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    drafted = []
    for _ in range(num_tokens):
        output = layers(config, tensors, embedding[tokens], features)
        normed = rms_norm(output, tensors["norm.weight"], eps)
        choice = int(linear(normed[-1], tensors["lm_head.weight"]).argmax())
        drafted.append(choice + int(d2t[choice]))
        tokens.append(drafted[-1])
        features = torch.cat([features, (normed if config["norm_output"] else output)[-1:]])
    return drafted


def layers(config, tensors, embedded, features):
    """The residual stream behind the head's layers, [T, H]."""
    eps = config["rms_norm_eps"]
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    hidden = features
    for number in range(config["num_hidden_layers"]):
        start = f"layers.{number}."
        part = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        x = rms_norm(hidden, part["hidden_norm.weight" if number == 0 else "input_layernorm.weight"], eps)
        if number == 0:
            hidden = x if config["norm_before_residual"] else hidden
            x = torch.cat([rms_norm(embedded, part["input_layernorm.weight"], eps), x], -1)  # [T, 2H]
        hidden = layer(config, part, x, hidden)
    return hidden


def layer(config, part, x, hidden):
    """The residual stream behind a layer whose attention reads ``x``, [T, H]."""
    eps, d = config["rms_norm_eps"], config["head_dim"]

    def project(name, x):
        return linear(x, part[f"self_attn.{name}_proj.weight"], part.get(f"self_attn.{name}_proj.bias"))

    query, key, value = (project(name, x).view(len(x), -1, d).transpose(0, 1) for name in "qkv")
    if config["architectures"] == ["Eagle3Qwen3ForCausalLM"]:
        query = rms_norm(query, part["self_attn.q_norm.weight"], eps)
        key = rms_norm(key, part["self_attn.k_norm.weight"], eps)
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    key, value = rotate(key, config["rope_theta"]).repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    window = config["sliding_window"] if "sliding_attention" in config.get("layer_types", []) else len(x)
    seen = (distance >= 0) & (distance < window)
    attended = scaled_dot_product_attention(rotate(query, config["rope_theta"]), key, value, seen)
    hidden = hidden + project("o", attended.transpose(0, 1).flatten(1))
    normed = rms_norm(hidden, part["post_attention_layernorm.weight"], eps)
    inner = silu(linear(normed, part["mlp.gate_proj.weight"])) * linear(normed, part["mlp.up_proj.weight"])
    return hidden + linear(inner, part["mlp.down_proj.weight"])
