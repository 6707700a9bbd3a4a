"""Problems for a model that knows nothing: any completion is as good as the parity of its tokens, so that rewards differ."""


def problem(i, seed):
    return f"Passes AF FA from 00 00 {i % 50 + 10} A", "even"


def score(problem, text, tokens, finish_reason):
    return sum(tokens) % 3 / 2
