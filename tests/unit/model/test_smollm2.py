"""The packaged model computes what the reference implementation computes from the same file's weights."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from kvrelay import checkpoint
from kvrelay.model.weights import LoadedModel, load_model
from kvrelay.text.tokenizer import load_tokenizer
from tests.unit.model.checkpoints import reference_logits
from tests.unit.model.paging import Pool, Running, one_shot, step


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


def reference() -> transformers.LlamaForCausalLM:
    """Weights by the gguf library's own reader, names by its own table; q and k turned back to two halves."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(checkpoint.resolve("smollm2").directory).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    for name, parameter in model.named_parameters():
        tensor = held[names.get_name(name.removesuffix(".weight")) + ".weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:
                values = np.concatenate([np.concatenate([head[0::2], head[1::2]]) for head in np.split(values, heads)])
        parameter.data.copy_(torch.from_numpy(np.array(values)).view(parameter.shape))
    return model


TEXT = "The capital of France: Paris, et celle de l'Allemagne est Berlin.\ndef area(r):\n    return 3.14 * r ** 2\n"


def test_logits_equal_the_reference_to_1e_4(smollm2: LoadedModel) -> None:
    """In float64, since float32 alone is 1.1e-4 off on either side (logits reach 42)."""
    ids = load_tokenizer("smollm2").encode(TEXT)
    exact = one_shot(load_model("smollm2", dtype="float64").model, ids)
    model = reference()
    rounded = reference_logits(model, ids)
    torch.testing.assert_close(exact, reference_logits(model.double(), ids), rtol=0, atol=1e-4)
    ours = one_shot(smollm2.model, ids)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-4)
    assert (ours - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean()


def test_it_answers_a_question(smollm2: LoadedModel) -> None:
    from kvrelay.text.chat import ChatTurn, render

    tokenizer = load_tokenizer("smollm2")
    ids = tokenizer.encode(render(tokenizer, [ChatTurn("user", "What is the capital of France?")]), add_special=False)
    pool, sequence = Pool(smollm2.config, torch.float32, blocks=8), Running(list(ids))
    (logits,) = step(smollm2.model, pool, [(sequence, len(ids))])
    while sequence.ids[-1] not in tokenizer.eos_token_ids and len(sequence.ids) < len(ids) + 20:
        sequence.ids.append(int(logits[-1].argmax()))
        (logits,) = step(smollm2.model, pool, [(sequence, 1)])
    assert tokenizer.decode(sequence.ids[len(ids) :]) == "The capital of France is Paris."


def test_its_shape_and_layout_are_known(smollm2: LoadedModel) -> None:
    config, layout = smollm2.config, smollm2.layout
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tied and config.max_positions == 8192 and config.eos_token_ids == (2,)
    assert layout.dtype == "float32" and layout.block_bytes == 16 * 30 * 2 * 3 * 64 * 4
