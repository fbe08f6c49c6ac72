"""One pool of blocks: shared blocks count once, finished sequences give way, nothing is lost."""

from __future__ import annotations

from paceline.core.sequence import Sequence
from paceline.engines.local.kv_manager import KVManager
from paceline.kv.prefix_cache import TARGET, PrefixCache
from tests.support.build import add, finish, plain_tokens, sequence, toy_engine
from tests.support.toy import ToyRunner, random_prompts


def manager(num_blocks: int, **options: bool) -> tuple[KVManager, ToyRunner]:
    runner = ToyRunner(num_blocks, **options)  # type: ignore[arg-type]
    return KVManager(runner, PrefixCache(runner.blocks.block_size)), runner


def read_prompt(seq: Sequence, kv: KVManager) -> None:
    """What prefill does: the cache holds all but the last token, and others may share it."""
    assert seq.seq_cache is not None
    seq.seq_cache.tokens, seq.seq_cache.length = seq.ids[:-1], len(seq.ids) - 1  # type: ignore[attr-defined]
    kv.publish(seq)


def test_two_sequences_with_one_long_prompt_fit_where_two_prompts_do_not() -> None:
    [prompt, other] = ([0, 1] * 16, [1, 0] * 16)  # eight blocks each
    kv, _ = manager(10)
    first, same, different = (sequence(ids, 4) for ids in (prompt, prompt, other))
    assert kv.admit(first)
    read_prompt(first, kv)
    assert not kv.admit(different), "eight more blocks are not there"
    assert kv.admit(same), "its blocks are shared"
    assert same.num_cached_tokens == 31 and kv.used_blocks == 8 and kv.blocks.free == 2


def test_a_shared_prompt_lets_more_sequences_run_at_a_time() -> None:
    """Through the engine: 4 sequences under one prompt of 40 blocks run together in 64 blocks, 4 prompts do not."""
    [prompt] = random_prompts(1, 155)
    shared = toy_engine(ToyRunner(64))
    for _ in range(4):
        add(shared, sequence(prompt, 20))
    apart = toy_engine(ToyRunner(64))
    for ids in random_prompts(4, 155):
        add(apart, sequence(ids, 20))
    running = {"shared": 0, "apart": 0}
    for name, engine in (("shared", shared), ("apart", apart)):
        while engine.has_work:
            engine.step()
            running[name] = max(running[name], engine.stats().running)
    assert running == {"shared": 4, "apart": 1}


def test_used_and_cached_blocks_add_up_to_what_is_not_free() -> None:
    kv, runner = manager(20)
    first, second = sequence([0, 1] * 8, 4), sequence([0, 1] * 8 + [2], 4)
    assert kv.admit(first)
    read_prompt(first, kv)
    assert (kv.used_blocks, kv.cached_blocks) == (4, 0)
    kv.release(first, keep=True)
    assert (kv.used_blocks, kv.cached_blocks) == (0, 4)
    assert kv.admit(second)
    assert second.num_cached_tokens == 15 and kv.cached_blocks == 0, "its cache goes on in the new sequence"
    kv.release(second, keep=False)
    kv.release(second, keep=False)  # twice is harmless
    assert runner.blocks.free == 20 and not runner.open_caches


def test_finished_sequences_give_way_to_a_new_one() -> None:
    kv, runner = manager(8)
    old = sequence([0] * 16, 4)
    assert kv.admit(old)
    read_prompt(old, kv)
    kv.release(old, keep=True)
    new = sequence([1] * 30, 2)
    assert kv.admit(new) and kv.used_blocks == 8 and kv.cached_blocks == 0
    assert len(runner.open_caches) == 1


def test_a_sequence_that_does_not_fit_beside_its_own_prefix_is_refused_and_the_prefix_stays() -> None:
    """The prefix it would continue counts as room only once."""
    kv, runner = manager(8)
    running, finished = sequence([2] * 16, 4), sequence([0] * 16, 4)
    for seq in (running, finished):
        assert kv.admit(seq)
        read_prompt(seq, kv)
    kv.release(finished, keep=True)
    longer = sequence([0] * 24, 4)
    assert not kv.admit(longer), "it needs six blocks, and four are running's"
    assert kv.cached_prefix(longer) == 15 and kv.cached_blocks == 4 and len(runner.open_caches) == 2


def test_a_runner_that_copies_forks_never_breaks_admission() -> None:
    """Its forks need blocks of their own, which the prefix does not save."""
    engine = toy_engine(ToyRunner(14, shares_blocks=False))
    prompt = [0, 1, 2, 3] * 8
    requests = [add(engine, sequence(prompt, 12)) for _ in range(3)]
    finish(engine)
    assert [request.tokens for request in requests] == [plain_tokens(prompt, 12)] * 3


def test_short_sequences_are_not_worth_keeping() -> None:
    kv, runner = manager(8)
    seq = sequence([0, 1, 2], 4)
    assert kv.admit(seq)
    read_prompt(seq, kv)
    kv.release(seq, keep=True)
    assert kv.cached_blocks == 0 and not runner.open_caches


def test_a_prefix_cache_of_no_tokens_keeps_nothing() -> None:
    runner = ToyRunner(8)
    kv = KVManager(runner, PrefixCache(4, {TARGET: 0}))
    seq = sequence([0] * 12, 4)
    assert not kv.keeps_finished and kv.admit(seq)
    read_prompt(seq, kv)
    kv.release(seq, keep=True)
    assert runner.blocks.free == 8 and kv.capacity == 32


def test_finished_sequences_make_room_for_steps_in_a_row_only_if_that_is_enough() -> None:
    kv, _ = manager(10)
    finished, running = sequence([0, 1] * 8, 4), sequence([1, 0] * 8, 4)  # four blocks each
    for seq in (finished, running):
        assert kv.admit(seq)
        read_prompt(seq, kv)
    kv.release(finished, keep=True)
    kv.make_room([running], 8)
    assert (kv.used_blocks, kv.cached_blocks) == (4, 4), "there is room already"
    kv.make_room([running], 40)
    assert (kv.used_blocks, kv.cached_blocks) == (4, 4), "more than the pool has"
    kv.make_room([running], 16)
    assert (kv.used_blocks, kv.cached_blocks) == (8, 0)
    kv.trim(running)
    assert kv.used_blocks == 4 and running.seq_cache is not None


def test_a_sequence_that_has_ended_has_nothing_to_trim() -> None:
    kv, _ = manager(10)
    kv.trim(sequence([0, 1], 4))
    assert kv.used_blocks == 0
