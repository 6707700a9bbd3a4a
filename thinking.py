"""
A budget for thinking, as a function that generate() calls on each choice of a token.

    budget = Thinking(end_id, start_id, minimum=200, maximum=4000, wait_ids=[...], stop_ids=tokenizer.eos_ids)
    done = generate(model, prompts, 8000, choose=budget, stop_ids=tokenizer.eos_ids)

The same hook takes a tool, whose output is forced token by token, or a rule about which token may follow: it
is anything that is called with a prompt and gives a function for that one sequence, which is called as
(token drawn) -> (token to take, whether it was forced). Forced tokens are never trained on.
"""
from collections import deque
from dataclasses import dataclass


@dataclass
class Thinking:
    """How many tokens may come between <think> and </think>, after s1 (arXiv 2501.19393).

    An end that comes before `minimum` tokens is replaced by `wait_ids`; after `maximum` (-1: unlimited) the
    end is forced. `start_id` may stand in the prompt or be emitted; None: a completion begins thinking.
    `stop_ids`: what ends the whole answer, and so the thinking too. Ids, not text: </think> is one token, and
    its pieces are another thing. Raises ValueError for numbers that do not fit each other."""
    end_id: int
    start_id: int | None = None
    minimum: int = 0
    maximum: int = -1
    wait_ids: tuple = ()
    stop_ids: tuple = ()

    def __post_init__(self):
        if self.end_id is None:
            raise ValueError("limits for thinking need a </think> token, and the tokenizer has none")
        if self.minimum < 0:
            raise ValueError(f"at least {self.minimum} thinking tokens: 0 or more")
        if self.minimum > 0 and not self.wait_ids:
            raise ValueError(f"at least {self.minimum} thinking tokens: wait_ids must say what comes instead")
        if self.maximum < -1 or 0 <= self.maximum < self.minimum:
            raise ValueError(f"at most {self.maximum} thinking tokens: -1 for no limit, or >= {self.minimum}")

    def open_in(self, prompt):
        """Whether a completion of this prompt begins inside the thinking."""
        if self.start_id is None:
            return True
        for token in reversed(prompt):
            if token in (self.start_id, self.end_id):
                return token == self.start_id
        return False

    def __call__(self, prompt):
        """What generate() calls on each token of one completion of this prompt."""
        return Budget(self, self.open_in(prompt))


class Budget:
    """The thinking of one sequence."""

    def __init__(self, rules, is_open):
        self.rules = rules
        self.is_open = is_open      # between <think> and </think>
        self.spent = 0              # tokens there
        self.waiting = deque()      # the rest of wait_ids, which comes next whatever is drawn

    def __call__(self, token):
        """-> the token that the sequence gets where `token` was drawn, and whether it was forced"""
        token, forced = self.decide(token)
        if token == self.rules.end_id:
            self.is_open = False
        elif self.is_open:
            self.spent += 1
        elif token == self.rules.start_id:
            self.is_open = True
        return token, forced

    def decide(self, token):
        rules = self.rules
        forced = bool(self.waiting)
        if forced:
            token = self.waiting.popleft()
        if not self.is_open:
            return token, forced
        is_end = token == rules.end_id
        if 0 <= rules.maximum <= self.spent and not is_end:
            self.waiting.clear()
            return rules.end_id, True
        ends_early = (is_end or token in rules.stop_ids) and self.spent < rules.minimum
        if ends_early and not forced:
            self.waiting.extend(rules.wait_ids)
            return self.waiting.popleft(), True
        return token, forced
