"""The router follows prefixes, within bounds on the difference of loads, and holds its invariants."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from server.engine.link.front_end.routing import MAX_GAP, MAX_RATIO, PrefixIndex, Router, block_keys

BLOCK = 4


def router(num_engines=2, num_blocks=100, num_adapters=2):
    made = Router(num_engines, BLOCK)
    for engine in range(num_engines):
        made.begin(engine, num_blocks, num_adapters)
    return made


def choose(router, prompt, loads=(0, 0), part=None, adapter=None):
    return router.choose(prompt, part, loads, range(len(loads)), adapter)


def prompt(number, length=40):
    return [number * 1000 + i for i in range(length)]


def test_new_prompts_go_to_the_least_loaded_engine():
    assert choose(router(3), prompt(1), (3, 1, 2)) == 1


def test_of_engines_with_equal_loads_the_one_that_knows_least_is_chosen_then_the_first():
    engines = router(3)

    assert [choose(engines, prompt(i), (0, 0, 0)) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_prompt_follows_its_prefix_to_a_busier_engine():
    engines = router()
    assert choose(engines, prompt(1)) == 0

    assert choose(engines, prompt(1) + prompt(2, 8), (MAX_GAP, 0)) == 0


def test_the_engine_with_the_longest_prefix_is_chosen():
    engines = router()
    choose(engines, prompt(1)[:20], (0, 1))
    choose(engines, prompt(1), (MAX_GAP + 1, 0))

    assert choose(engines, prompt(1), (0, 1)) == 1


def test_a_short_match_does_not_count():
    engines = router()
    choose(engines, prompt(1, 12))

    assert choose(engines, prompt(1, 12) + prompt(2, 28), (1, 0)) == 0
    assert choose(engines, prompt(1, 12) + prompt(3, 29), (1, 0)) == 1


def test_a_prompt_leaves_an_overloaded_engine_and_is_known_at_both_afterwards():
    engines = router()
    choose(engines, prompt(1))
    few, many = (MAX_GAP + 1, 0), (2 * MAX_GAP + 1, MAX_GAP)

    assert choose(engines, prompt(1), few) == 1
    assert choose(engines, prompt(1), many) == 1
    assert choose(engines, prompt(1), (3, 4)) == 0


def test_a_large_gap_alone_is_no_overload():
    engines = router()
    choose(engines, prompt(1))
    load = 10 * MAX_GAP

    assert choose(engines, prompt(1), (int(load * MAX_RATIO), load)) == 0
    assert choose(engines, prompt(1), (int(load * MAX_RATIO) + 1, load)) == 1


def test_only_engines_that_are_ready_are_chosen():
    engines = router(3)
    assert choose(engines, prompt(1), (0, 0, 0)) == 0

    assert engines.choose(prompt(1), None, (0, 5, 4), {1, 2}) == 2


def test_an_engine_that_starts_again_has_no_prefixes():
    engines = router()
    choose(engines, prompt(1))
    engines.begin(0, 100)

    assert not engines._indexes[0]
    assert choose(engines, prompt(1), (1, 0)) == 1


def test_without_a_prefix_cache_the_load_decides():
    engines = router(num_blocks=0)
    choose(engines, prompt(1))

    assert choose(engines, prompt(1), (1, 0)) == 1


def test_parts_of_the_prefix_cache_share_nothing():
    engines = router()
    assert choose(engines, prompt(1), part="a") == 0

    assert choose(engines, prompt(1), (1, 0), part="b") == 1
    assert choose(engines, prompt(1), (1, 0), part="a") == 0


def test_a_request_goes_to_the_engine_that_has_its_adapter_unless_that_is_overloaded():
    engines = router()
    assert choose(engines, prompt(1), adapter="a") == 0
    assert choose(engines, prompt(2), adapter="b") == 1, "it has fewer adapters"
    assert choose(engines, prompt(3), (0, 5), adapter="b") == 1
    assert choose(engines, prompt(4), (5, 0), adapter="a") == 0
    assert choose(engines, prompt(5), (MAX_GAP + 1, 0), adapter="a") == 1
    assert choose(engines, prompt(6), (3, 2), adapter="a") == 1, "now both have it"


def test_a_known_prefix_counts_more_than_an_adapter():
    engines = router()
    choose(engines, prompt(1), (0, 1), adapter="a")
    choose(engines, prompt(2), (MAX_GAP + 1, 0), adapter="a")
    assert choose(engines, prompt(1), (5, 0), adapter="a") == 0


def test_the_adapter_that_no_request_has_chosen_for_the_longest_time_is_forgotten():
    engines = router(num_adapters=2)
    for number, name in enumerate("abac"):
        choose(engines, prompt(number), (0, 1), adapter=name)
    assert choose(engines, prompt(10), (1, 0), adapter="a") == 0
    assert choose(engines, prompt(11), (1, 0), adapter="b") == 1
    engines.begin(0, 100, 2)
    assert choose(engines, prompt(12), (1, 0), adapter="a") == 1


def test_the_least_recently_used_prompt_is_forgotten_first_from_its_end():
    index = PrefixIndex(capacity=6)
    first, second, third = (block_keys(prompt(i, 4 * BLOCK), BLOCK, None) for i in range(3))
    index.add(first)
    index.add(second)
    assert (index.match(first), index.match(second)) == (2, 4)
    index.add(first)
    assert (index.match(first), index.match(second)) == (4, 2)
    index.add(third)
    assert [index.match(keys) for keys in (first, second, third)] == [2, 0, 4]


def test_a_prompt_longer_than_the_cache_keeps_its_beginning():
    index = PrefixIndex(capacity=3)
    keys = block_keys(prompt(1), BLOCK, None)
    index.add(keys)

    assert index.match(keys) == len(index) == 3


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_equal_keys_mean_equal_prefixes(a, b):
    same = sum(x == y for x, y in zip(block_keys(a, 3, "p"), block_keys(b, 3, "p"), strict=False))

    assert a[: 3 * same] == b[: 3 * same]
    assert same == min(len(a), len(b)) // 3 or a[3 * same :][:3] != b[3 * same :][:3]


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


class Routing(RuleBasedStateMachine):
    """Compares a router with the set of all prompts that it has sent to each engine."""

    @initialize(num_engines=st.integers(1, 4), capacities=st.lists(st.integers(0, 8), min_size=4))
    def start(self, num_engines, capacities):
        self.capacities = capacities[:num_engines]
        self.routers = [Router(num_engines, BLOCK), Router(num_engines, BLOCK)]
        self.sent = [[] for _ in self.capacities]
        for engine in range(num_engines):
            self.restart(engine)

    @rule(data=st.data(), tokens=TOKENS, part=st.sampled_from([None, "a"]))
    def send(self, data, tokens, part):
        engines = range(len(self.capacities))
        loads = data.draw(st.tuples(*[st.integers(0, 4 * MAX_GAP) for _ in engines]))
        ready = data.draw(st.sets(st.sampled_from(engines), min_size=1))
        indexes = self.routers[0]._indexes
        keys = block_keys(tokens, BLOCK, part)
        before = {engine: indexes[engine].match(keys) for engine in ready}
        chosen, again = (router.choose(tokens, part, loads, ready) for router in self.routers)
        self.sent[chosen].append(keys)

        assert chosen == again
        assert chosen in ready
        least = min(loads[engine] for engine in ready)
        gap = loads[chosen] - least
        assert gap <= MAX_GAP or loads[chosen] <= MAX_RATIO * least
        if gap:  # only for the longest known prefix
            assert before[chosen] == max(before.values()) > 0
        assert indexes[chosen].match(keys) == min(len(keys), self.capacities[chosen])

    @rule(data=st.data(), keeps=st.booleans())
    def start_again(self, data, keeps):
        engine = data.draw(st.sampled_from(range(len(self.capacities))))
        self.restart(engine, keeps=keeps)
        assert not self.routers[0]._indexes[engine]

    def restart(self, engine, keeps=True):
        self.capacities[engine] *= keeps
        self.sent[engine].clear()
        for router in self.routers:
            router.begin(engine, self.capacities[engine])

    @invariant()
    def each_index_holds_only_whole_beginnings_of_what_was_sent(self):
        for index, capacity, sent in zip(
            self.routers[0]._indexes, self.capacities, self.sent, strict=True
        ):
            assert len(index) <= capacity
            held = set(index._blocks)
            assert held <= {key for keys in sent for key in keys}
            for keys in sent:
                present = [key in held for key in keys]
                assert present == sorted(present, reverse=True)
                assert index.match(keys) == sum(present)


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=30)
