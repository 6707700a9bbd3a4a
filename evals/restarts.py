r"""
Policies of eval.py that attend to everything, but in contexts of P + W tokens, as much as Prefix Sliding ever
holds: each brings the samples of a Sampler to their end. What they take beside it are keys of eval.py.
"""
import inspect

from thinking import Thinking


def full_stop(sampler, cue, answer_tokens):
    """Full attention that has to answer when its context is full."""
    tokenizer = sampler.tokenizer
    think, end_think = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    for sample in sampler.go_on(reserve=full_stop_takes(tokenizer, cue, answer_tokens)):
        said = tokenizer.encode(cue)
        if end_think is not None and end_think not in sample.tokens:
            if Thinking(end_think, think).open_in(sample.context):
                said = [end_think, *said]
        for token in said[:sampler.tokens_left(sample)]:
            sampler.token(sample, token)
    for sample in sampler.go_on(limit=answer_tokens):
        sample.finish_reason = "length"
        sampler.complete(sample)


def full_stop_takes(tokenizer, cue, answer_tokens):
    ends_thinking = tokenizer.token_id("</think>") is not None
    return ends_thinking + len(tokenizer.encode(cue)) + answer_tokens


def last_k(sampler, carry_first, carry_last):
    """Restarts with the last raw tokens; with the first ones too it is Delethink's carry-over."""
    while running := sampler.go_on():
        for sample in running:
            first, rest = sample.tokens[:carry_first], sample.tokens[carry_first:]
            sample.context = sample.prompt + first + rest[max(len(rest) - carry_last, 0):]


def last_k_takes(tokenizer, carry_first, carry_last):
    return carry_first + carry_last


def summary(sampler, summary_prompt, summary_form, summary_tokens):
    """Restarts with a summary by the same model. It costs time but counts for no tokens of the sample."""
    tokenizer = sampler.tokenizer
    opening, closing = summary_form.split("{}")
    before, after, ask = map(tokenizer.encode, (opening, closing, summary_prompt))
    think, end = tokenizer.token_id("<think>"), closing.strip()
    stop = dict(stop_strings=(end,), decode=tokenizer.decode) if end else {}
    while running := sampler.go_on(reserve=len(ask) + summary_tokens):
        for sample in running:
            sample.context += ask
        written = sampler.draw(running, summary_tokens, aside=True, **stop)
        for sample, notes in zip(running, written, strict=True):
            notes = [token for token in notes if token not in tokenizer.eos_ids]
            if end:
                text = tokenizer.decode(notes).partition(end)[0]
                notes = tokenizer.encode(text)[:summary_tokens]
            place = sample.prompt_tokens
            if think in sample.prompt[-2:]:
                place = sample.prompt.index(think, -2)
            notes = before + notes + after
            sample.context = sample.prompt[:place] + notes + sample.prompt[place:]


def summary_takes(tokenizer, summary_prompt, summary_form, summary_tokens):
    said = (summary_prompt, *summary_form.split("{}"))
    return sum(len(tokenizer.encode(text)) for text in said) + 2 * summary_tokens


RESTARTS = dict(full_stop=full_stop, last_k=last_k, summary=summary)
TAKES = dict(full_stop=full_stop_takes, last_k=last_k_takes, summary=summary_takes)
OWN_KEYS = {policy: tuple(inspect.signature(run).parameters)[1:] for policy, run in RESTARTS.items()}


def check_room(arm, keys):
    """ValueError unless the W tokens of a context have room for new ones beside what is carried into it and
    what is said at its end. arm: an Arm of eval.py; keys: a dict of its OWN_KEYS."""
    taken = TAKES[arm.policy](arm.weights.tokenizer, **keys)
    if taken >= arm.window:
        raise ValueError(
            f"{arm}: what is carried into a context and said at its end takes {taken} of its {arm.window} "
            f"tokens: a larger window, or smaller {', '.join(keys)}")
