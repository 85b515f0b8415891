"""The tokenizer is lossless, and its template marks what is to be learned."""


def test_any_text_survives_the_tokenizer(tokenizer, source):
    for text in (source, "\tx = 'äöü 漢字 \U0001f600'\r\n\n\n        return 12345678\n", "<|end|> as text"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_template_marks_the_answer_and_its_end(tokenizer):
    messages = [{"role": "user", "content": "def f():"}, {"role": "assistant", "content": "    return 1"}]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    answer = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(answer) == "    return 1<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert encoded["input_ids"][: len(prompt)] == prompt
