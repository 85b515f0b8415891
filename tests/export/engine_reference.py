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
    if config["fc_norm"]:
        aux = [rms_norm(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(aux)]
    features = linear(torch.cat(aux, -1), tensors["fc.weight"])  # [T, H]
    tokens = [*prompt[1:], first_token]
    d2t = tensors.get("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
    drafted = []
    for _ in range(num_tokens):
        output = layer(config, tensors, model.get_input_embeddings().weight[tokens], features)
        normed = rms_norm(output, tensors["norm.weight"], eps)
        choice = int(linear(normed[-1], tensors["lm_head.weight"]).argmax())
        drafted.append(choice + int(d2t[choice]))
        tokens.append(drafted[-1])
        features = torch.cat([features, (normed if config["norm_output"] else output)[-1:]])
    return drafted


def layer(config, tensors, embedded, features):
    """The residual stream behind the head's layer, [T, H]."""
    part = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items() if name.startswith("midlayer.")}
    eps, d = config["rms_norm_eps"], config["head_dim"]
    x = torch.cat(
        [
            rms_norm(embedded, part["input_layernorm.weight"], eps),
            rms_norm(features, part["hidden_norm.weight"], eps),
        ],
        -1,
    )  # [T, 2H]
    query, key, value = (
        linear(x, part[f"self_attn.{name}_proj.weight"]).view(len(x), -1, d).transpose(0, 1) for name in "qkv"
    )
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    key, value = rotate(key, config["rope_theta"]).repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    attended = scaled_dot_product_attention(rotate(query, config["rope_theta"]), key, value, is_causal=True)
    hidden = features + linear(attended.transpose(0, 1).flatten(1), part["self_attn.o_proj.weight"])
    normed = rms_norm(hidden, part["post_attention_layernorm.weight"], eps)
    inner = silu(linear(normed, part["mlp.gate_proj.weight"])) * linear(normed, part["mlp.up_proj.weight"])
    return hidden + linear(inner, part["mlp.down_proj.weight"])
