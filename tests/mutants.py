"""Contract: the tests see every fault of this table, each by the test that is named for it.

A mutant is production source with one place edited into a fault that someone could make (most were
made, in public projects). It runs as a module of its own, in the place of the real one in the
module of its killer, a quick test. The killer passes on the real source and must fail here.

    python tests/mutants.py        # the table; status 1 if a mutant survives

An edit that no longer matches its source exactly once is an error, as is one that does not run: so
the table follows the source. A killer that does not come to its end has failed too.
"""

import contextlib
import functools
import importlib
import signal
import sys
import time
import types
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent

# How a test fails. A NameError or a TypeError is the mutant's own mistake, and goes through.
FAILURES = (
    AssertionError, ValueError, IndexError, TimeoutError, Warning, pytest.fail.Exception,
)  # fmt: skip

TIME_LIMIT = 20.0  # seconds; the killers need less than one

# The killers of more than one mutant.
JOINT_LAW = "test_exact:test_joint_law_of_a_few"
EFFICIENCY = "test_exact:test_accepted_proposals_and_tokens_of_a_second_round"
ONE_PROPOSAL = "test_exact:test_one_proposal_is_accepted_with_probability_sum_min_p_q"
CACHES = "test_exact:test_caches_after_the_rounds_of_one_pair"
LOOKUP = "test_exact:test_prompt_lookup_of_a_few"
LOOKUP_BY_HAND = "test_sampling:test_prompt_lookup_by_hand"
FIXTURE_F = "test_sampling:test_F_has_law_p_and_acceptance_four_tenths"
ONE_MODEL = "test_cache:test_cached_equals_recomputed_for_one_model"
TWO_MODELS = "test_cache:test_each_way_and_no_later_token_for_two_models"
DEFINITION = "test_draft:test_the_definition_for_one_pair"
BLOCK_LAW = "test_exact:test_joint_law_of_a_few_by_block"
TRANSLATED = (
    "test_translated:test_q_is_the_drafts_law_on_the_spelled_text_restricted_and_renormalised"
)
PACKED = "test_quantize:check_groups_and_halves"
SMALL_SAMPLE = "test_montecarlo:test_texts_of_a_small_sample"


class Mutant(NamedTuple):
    """One fault: the edit old -> new of a file, and the test that must see it."""

    fault: str
    old: str
    new: str
    killer: str  # "test file:function"
    file: str = "minispec.py"


MUTANTS = [
    # --- one verification
    Mutant(
        "residual := p",
        "randomness.categorical(residual(p[i], q[i]))",
        "randomness.categorical(p[i])",
        FIXTURE_F,
    ),
    Mutant(
        "residual by softmax",
        "return r / total if total > 0 else p / p.sum()",
        "return np.exp(r) / np.exp(r).sum() if total > 0 else p / p.sum()",
        FIXTURE_F,
    ),
    Mutant(
        "residual without its fallback for p = q",
        "return r / total if total > 0 else p / p.sum()",
        "return r / total",
        "test_sampling:test_B04_no_residual_left",
    ),
    Mutant(
        "residual of q over p",
        "np.maximum(p - q, 0)",
        "np.maximum(q - p, 0)",
        FIXTURE_F,
    ),
    Mutant(
        "residual of both signs",
        "np.maximum(p - q, 0)",
        "np.abs(p - q)",
        FIXTURE_F,
    ),
    Mutant(
        "residual from the neighbouring row of p",
        "residual(p[i], q[i])",
        "residual(p[i - 1], q[i])",
        JOINT_LAW,
    ),
    Mutant(
        "residual from the neighbouring row of q",
        "residual(p[i], q[i])",
        "residual(p[i], q[i - 1])",
        JOINT_LAW,
    ),
    Mutant(
        "proposal verified by the next row of p",
        "randomness.accept(p[i][x], q[i][x])",
        "randomness.accept(p[i + 1][x], q[i][x])",
        JOINT_LAW,
    ),
    Mutant(
        "proposal verified against the neighbouring row of q",
        "randomness.accept(p[i][x], q[i][x])",
        "randomness.accept(p[i][x], q[i - 1][x])",
        JOINT_LAW,
    ),
    Mutant(
        "ratio inverted",
        "randomness.accept(p[i][x], q[i][x])",
        "randomness.accept(q[i][x], p[i][x])",
        FIXTURE_F,
    ),
    Mutant(
        "first proposal unverified",
        "if not randomness.accept(",
        "if i > 0 and not randomness.accept(",
        "test_sampling:test_B17_the_first_proposal_is_verified",
    ),
    Mutant(
        "every proposal accepted",
        "if not randomness.accept(p[i][x], q[i][x])",
        "if False",
        FIXTURE_F,
    ),
    Mutant(
        "no proposal accepted",
        "if not randomness.accept(p[i][x], q[i][x])",
        "if True",
        FIXTURE_F,
    ),
    Mutant(
        "bonus from row K - 1",
        "randomness.categorical(p[-1])",
        "randomness.categorical(p[-2:][0])",
        JOINT_LAW,
    ),
    Mutant(
        "bonus from q",
        "randomness.categorical(p[-1])",
        "randomness.categorical((q or p)[-1])",
        JOINT_LAW,
    ),
    Mutant(
        "bonus from the residual",
        "randomness.categorical(p[-1])",
        "randomness.categorical(residual(p[-1], q[-1]) if q else p[-1])",
        JOINT_LAW,
    ),
    # --- coins and draws
    Mutant(
        "<= for < in the coin",
        "u * b < a",
        "u * b <= a",
        "test_montecarlo:test_a_token_of_probability_0_never_passes",
    ),
    Mutant(
        "draw of a token of probability 0",
        'side="right"',
        'side="left"',
        "test_montecarlo:test_a_draw_is_never_of_probability_0",
    ),
    Mutant(
        "one uniform shared by draft and residual",
        "u = self.rng.random() * cumulative[-1]",
        'u = self.__dict__.pop("u", None) or self.__dict__.setdefault("u", self.rng.random())',
        SMALL_SAMPLE,
    ),
    Mutant(
        "one uniform shared by a coin and the next draw",
        "return self.rng.random()",
        'return __import__("copy").deepcopy(self.rng).random()',
        SMALL_SAMPLE,
    ),
    Mutant(
        "a generator seeded anew for every coin",
        "return self.rng.random()",
        "return np.random.default_rng(0).random()",
        SMALL_SAMPLE,
    ),
    Mutant(
        "the seed ignored",
        "np.random.default_rng(seed)",
        "np.random.default_rng()",
        "test_montecarlo:test_B58_a_seed_repeats_a_text_and_another_changes_it",
    ),
    Mutant(
        "the global generator used",
        "return self.rng.random()",
        "return np.random.random()",
        "test_montecarlo:test_B58_the_global_generator_is_left_alone",
    ),
    # --- the sampling law
    Mutant(
        "temperature multiplied",
        "np.divide(p, temperature, out=p)",
        "np.multiply(p, temperature, out=p)",
        "test_exact:test_filters_shape_the_target_law_of_a_few",
    ),
    Mutant(
        "temperature 0 takes the last of equals",
        "z.argmax(axis=-1, keepdims=True)",
        "z.shape[-1] - 1 - z[..., ::-1].argmax(axis=-1, keepdims=True)",
        "test_sampling:test_temperature_0_takes_the_first_of_equals",
    ),
    Mutant(
        "temperature 0 as a softmax of the one-hot",
        "        return p\n    with np.errstate",
        "        z, best, temperature = p, 1.0, 1.0\n    with np.errstate",
        "test_sampling:test_B02_one_hot_over_a_large_vocabulary",
    ),
    Mutant(
        "top-p <= : one token too many where the sum is exact",
        "before < top_p",
        "before <= top_p",
        "test_sampling:test_B10_top_p_reached_exactly_is_reached",
    ),
    Mutant(
        "top-p without the token that crosses",
        "np.concatenate(([0.0], np.cumsum(p[order])[:-1]))",
        "np.cumsum(p[order])",
        "test_sampling:test_B05_top_p_shapes_the_target_as_well_as_the_draft",
    ),
    Mutant(
        "top-p leaves out too much before it sorts",
        "p >= (1 - top_p) / p.size",
        "p >= (1 - top_p)",
        "test_exact:test_filters_shape_the_target_law_of_a_few",
    ),
    Mutant(
        "top-k not renormalised before top-p",
        "    if top_k:\n        p = np.apply_along_axis(_keep_top_k, -1, p, top_k)\n"
        "    p /= p.sum(axis=-1, keepdims=True)\n",
        "    p /= p.sum(axis=-1, keepdims=True)\n"
        "    if top_k:\n        p = np.apply_along_axis(_keep_top_k, -1, p, top_k)\n",
        "test_sampling:test_B12_top_k_renormalises_before_top_p",
    ),
    Mutant(
        "top-k keeps one too many",
        '-p[candidates], kind="stable")][:k])',
        '-p[candidates], kind="stable")][: k + 1])',
        "test_sampling:test_equal_tokens_at_the_edge_of_top_k_go_by_index",
    ),
    Mutant(
        "top-k keeps all of equals",
        '_keep(p, candidates[np.argsort(-p[candidates], kind="stable")][:k])',
        "_keep(p, candidates)",
        "test_sampling:test_equal_tokens_at_the_edge_of_top_k_go_by_index",
    ),
    # --- the drafters
    Mutant(
        "argmax draft with a soft q",
        "randomness.categorical(q[-1]))\n        return",
        "int(np.argmax(q[-1])))\n        return",
        JOINT_LAW,
    ),
    Mutant(
        "q other than the one sampled from",
        "randomness.categorical(q[-1]))\n        return",
        "randomness.categorical(law(fit_width(2 * logits, self.vocab))))\n        return",
        JOINT_LAW,
    ),
    Mutant(
        "filters on the target only",
        "q.append(law(fit_width(logits, self.vocab)))",
        "q.append(probabilities(fit_width(logits, self.vocab)))",
        "test_exact:test_filters_shape_the_draft_law_too",
    ),
    Mutant(
        "filters on the draft only",
        "p = law(target(",
        "p = probabilities(target(",
        "test_exact:test_filters_shape_the_target_law_of_a_few",
    ),
    Mutant(
        "stale draft cache: nothing rolled back",
        "self.cache.truncate(min(length, self.cache.length))",
        "pass",
        EFFICIENCY,
    ),
    Mutant(
        "draft cache rolled back one too far",
        "self.cache.truncate(min(length, self.cache.length))",
        "self.cache.truncate(min(length, self.cache.length) - 1)",
        CACHES,
    ),
    Mutant(
        "a narrower draft fed with ids that it has no embedding for",
        "known = [min(x, self.model.vocab - 1) for x in tokens]",
        "known = list(tokens)",
        "test_exact:test_B36_a_narrower_draft_goes_on_after_an_id_past_its_own",
    ),
    Mutant(
        "draft blind for the last token",
        "self.model(known + proposals, self.cache, rows=1)[0]",
        "self.model(known[:-1] + proposals, self.cache, rows=1)[0]",
        ONE_PROPOSAL,
    ),
    Mutant(
        "draft blind for its own proposals",
        "logits = self.model(known + proposals, self.cache, rows=1)[0]",
        "logits = self.model(tokens, self.model.new_cache(len(tokens)), rows=1)[0]",
        EFFICIENCY,
    ),
    Mutant(
        "draft one token past its context",
        "self.model.context - len(tokens) + 1",
        "self.model.context - len(tokens) + 2",
        "test_exact:test_past_the_context_of_the_draft_the_text_goes_on",
    ),
    Mutant(
        "draft gives up one token before its context",
        "self.model.context - len(tokens) + 1",
        "self.model.context - len(tokens)",
        "test_exact:test_the_draft_proposes_to_the_end_of_its_context",
    ),
    Mutant(
        "padding of a narrow draft may be proposed",
        "np.full(missing, -np.inf)",
        "np.full(missing, 0.0)",
        "test_sampling:test_fit_width_cuts_or_pads",
    ),
    Mutant(
        "padding of a narrow draft one short",
        "max(0, vocab - len(logits))",
        "max(0, vocab - len(logits) - 1)",
        "test_sampling:test_fit_width_cuts_or_pads",
    ),
    Mutant(
        "wide draft cut one too late",
        "if missing else logits[:vocab]",
        "if missing else logits[: vocab + 1]",
        "test_sampling:test_fit_width_cuts_or_pads",
    ),
    Mutant(
        "wide draft not cut",
        "if missing else logits[:vocab]",
        "if missing else logits",
        "test_exact:test_B36_draft_of_another_width_by_hand",
    ),
    Mutant(
        "lookup with a soft q",
        "[point_mass(x, self.vocab) for x in proposals]",
        "[np.full(self.vocab, 1 / self.vocab) for x in proposals]",
        LOOKUP,
    ),
    Mutant(
        "lookup copies one token too early",
        "copy.append(copy[at + i])",
        "copy.append(copy[at + i - 1])",
        LOOKUP_BY_HAND,
    ),
    Mutant(
        "lookup finds the current n-gram itself",
        "range(self.indexed, len(tokens))",
        "range(self.indexed, len(tokens) + 1)",
        LOOKUP_BY_HAND,
    ),
    Mutant(
        "lookup keeps the first occurrence",
        "        self.follower[ngram] = end",
        "        self.follower.setdefault(ngram, end)",
        LOOKUP_BY_HAND,
    ),
    Mutant(
        "lookup prefers the shortest n-gram",
        "range(longest, shortest - 1, -1)",
        "range(shortest, longest + 1)",
        LOOKUP_BY_HAND,
    ),
    # --- a draft conditioned on the target's states
    Mutant(
        "the state of a token beside the token itself",
        "back = cache.states[max(0, a - 1) : a + T - 1, :]",
        "back = cache.states[a + (a == 0) : a + T, :]",
        DEFINITION,
        "model.py",
    ),
    Mutant(
        "guesses kept where the target's states are known",
        "super().keep(min(length, self.cache.known + 1))",
        "super().keep(length)",
        DEFINITION,
    ),
    Mutant(
        "one guess kept where the target's state is known",
        "super().keep(min(length, self.cache.known + 1))",
        "super().keep(min(length, self.cache.known + 2))",
        DEFINITION,
    ),
    Mutant(
        "the target's newest state not taken over",
        "new = slice(self.cache.known, verified)",
        "new = slice(self.cache.known, verified - 1)",
        DEFINITION,
    ),
    Mutant(
        "drafting on states that the target has not computed",
        "if self.seen.length < verified or verified > self.cache.capacity:",
        "if verified > self.cache.capacity:",
        DEFINITION,
    ),
    Mutant(
        "a piece of a long prompt overwrites the state that the next one reads",
        "first = max(cache.known, cache.length - len(new))",
        "first = cache.length - len(new)",
        "test_draft:test_a_long_prompt_in_pieces_gives_the_same_proposals",
        "model.py",
    ),
    Mutant(
        "the head's rows taken for the first tokens",
        "rows[ids] = np.arange(len(ids))",
        "rows[: len(ids)] = np.arange(len(ids))",
        "test_draft:test_a_trimmed_head_by_hand",
        "model.py",
    ),
    Mutant(
        "a chain that rolls back only its first drafter",
        """for d in self.drafters:
            d.keep(length)""",
        "self.drafters[0].keep(length)",
        "test_draft:test_a_chain_of_two",
    ),
    Mutant(
        "a chain that asks only its first drafter",
        "next((found for found in each if found[0]), ([], []))",
        "next(each)",
        "test_draft:test_a_chain_of_two",
    ),
    # --- the loop
    Mutant(
        "last token missing from the pass of the target",
        "target(tokens + proposals, cache",
        "target(tokens[:-1] + proposals, cache",
        JOINT_LAW,
    ),
    Mutant(
        "no bonus",
        "[*proposals[:n], last]",
        "[*proposals[:n], last][: len(proposals) or 1]",
        EFFICIENCY,
    ),
    Mutant(
        "accepted token dropped on rejection",
        "[*proposals[:n], last]",
        "[*proposals[: max(0, n - (n < len(proposals)))], last]",
        JOINT_LAW,
    ),
    Mutant(
        "rejected token kept",
        "[*proposals[:n], last]",
        "[*proposals[: n + 1], last]",
        JOINT_LAW,
    ),
    Mutant(
        "stop token inside a block ignored",
        "emitted = up_to_stop([*proposals[:n], last], stop)",
        "emitted = [*proposals[:n], last]",
        "test_cache:test_B29_nothing_follows_a_stop_token",
    ),
    Mutant(
        "stop token left out",
        "return tokens[: first + 1]",
        "return tokens[:first] or tokens[:1]",
        "test_cache:test_B29_nothing_follows_a_stop_token",
    ),
    Mutant(
        "proposals past a stop token counted as accepted",
        "accepted=min(n, len(emitted))",
        "accepted=n",
        "test_cache:test_B29_nothing_follows_a_stop_token",
    ),
    Mutant(
        "p reported from the next row",
        "p=chosen(p, proposals)",
        "p=chosen(p[1:], proposals)",
        "test_exact:test_a_round_reports_the_probabilities_of_its_proposals",
    ),
    Mutant(
        "cap ignored inside a block",
        "min(K, end - len(tokens) - 1)",
        "K",
        "test_cache:test_B30_never_more_tokens_than_asked_for",
    ),
    Mutant(
        "cap one token too late",
        "min(K, end - len(tokens) - 1)",
        "min(K, end - len(tokens))",
        "test_cache:test_B30_never_more_tokens_than_asked_for",
    ),
    Mutant(
        "context ignored",
        "min(len(prompt) + max_new_tokens, target.context)\n    cache, ended",
        "len(prompt) + max_new_tokens\n    cache, ended",
        "test_exact:test_the_context_of_the_target_ends_a_text",
    ),
    Mutant(
        "the reasons for an end swapped",
        '"length" if end - len(prompt) == max_new_tokens else "context"',
        '"context" if end - len(prompt) == max_new_tokens else "length"',
        "test_exact:test_why_a_text_ended",
    ),
    Mutant(
        "stale entries kept after rollback",
        "cache.truncate(len(tokens) - 1)",
        "pass",
        JOINT_LAW,
    ),
    Mutant(
        "rollback one entry short",
        "cache.truncate(len(tokens) - 1)",
        "cache.truncate(len(tokens))",
        JOINT_LAW,
    ),
    Mutant(
        "rollback one entry too far",
        "cache.truncate(len(tokens) - 1)",
        "cache.truncate(len(tokens) - 2)",
        CACHES,
    ),
    Mutant(
        "plain decoding does not stop",
        "while len(tokens) < end and last not in stop:",
        "while len(tokens) < end:",
        "test_exact:test_autoregressive_is_the_specification",
    ),
    # --- the forward pass and its cache
    Mutant(
        "mask that leaks the proposal",
        "keys[None, :] <= positions[:, None]",
        "keys[None, :] <= positions[:, None] + 1",
        TWO_MODELS,
        "model.py",
    ),
    Mutant(
        "mask from the upper left",
        "xp.arange(S, device=device), xp.arange(S - T, S, device=device)",
        "xp.arange(S, device=device), xp.arange(T, device=device)",
        TWO_MODELS,
        "model.py",
    ),
    Mutant(
        "rotary positions that begin again at 0",
        "xp.arange(S - T, S, dtype=self.backend.dtype, device=device)",
        "xp.arange(T, dtype=self.backend.dtype, device=device)",
        TWO_MODELS,
        "model.py",
    ),
    Mutant(
        "learned positions that begin again at 0",
        "ids = self.backend.xp.arange(cache.length, S, device",
        "ids = self.backend.xp.arange(0, len(new), device",
        TWO_MODELS,
        "model.py",
    ),
    Mutant(
        "heads that share a key head dealt out in turn",
        "q = xp.reshape(q, (G, H // G * T, C)) * C**-0.5",
        "q = xp.permute_dims(xp.reshape(q, (H // G, G, T, C)), (1, 0, 2, 3))\n"
        "    q = xp.reshape(q, (G, H // G * T, C)) * C**-0.5",
        "test_mutants:check_logits_of_hugging_face",
        "model.py",
    ),
    Mutant(
        "last token missing from the cache",
        "cache.v[l, :, S - T : S, :] = v",
        "cache.v[l, :, S - T : S - 1, :] = v[:, :-1, :]",
        ONE_MODEL,
        "model.py",
    ),
    Mutant(
        "a translated draft's q read from the target's ids",
        "rows=1)[0][self.theirs]",
        "rows=1)[0][self.ours]",
        TRANSLATED,
    ),
    Mutant(
        "a translated draft's cache keeps what was rejected",
        "super().keep(self.ends[min(length, len(self.ends) - 1)])",
        "super().keep(self.ends[-1])",
        TRANSLATED,
    ),
    Mutant(
        "a token that the draft cannot spell leaves it nothing to read",
        "self.cache.truncate(min(self.cache.length, max(0, len(known) - 1)))",
        "pass",
        "test_translated:test_ids_without_a_row_in_the_model_are_left_out",
    ),
    Mutant(
        "truncate forgets nothing",
        "        self.length = length",
        "        pass",
        ONE_MODEL,
        "model.py",
    ),
    Mutant(
        "truncate to more than there is",
        "if not 0 <= length <= self.length:",
        "if not 0 <= length:",
        "test_cache:test_truncate_forgets_and_refuses_what_is_not_there",
        "model.py",
    ),
    Mutant(
        "rows cut off by the last piece of a long prompt",
        "last = max(rows, (len(new) - 1) % self.LONGEST_PASS + 1)",
        "last = (len(new) - 1) % self.LONGEST_PASS + 1",
        "test_cache:test_a_long_prompt_for_one_model",
        "model.py",
    ),
    Mutant(
        "a long prompt in one piece",
        "(len(new) - 1) % self.LONGEST_PASS + 1)",
        "len(new))",
        "test_cache:test_no_pass_is_longer_than_a_piece_or_the_rows_asked_for",
        "model.py",
    ),
    # --- the other rules
    Mutant(
        "block: the first failed coin ends it",
        "            n, weight = i, w\n",
        "            n, weight = i, w\n        else:\n            break\n",
        BLOCK_LAW,
    ),
    Mutant(
        "block: the last weight, not that of the prefix",
        "residual(weight * p[n], q[n])",
        "residual(w * p[n], q[n])",
        BLOCK_LAW,
    ),
    Mutant(
        "block: weights may exceed 1",
        "w = min(1.0, w * p[i - 1][x] / q[i - 1][x])",
        "w = w * p[i - 1][x] / q[i - 1][x]",
        BLOCK_LAW,
    ),
    Mutant(
        "match: the proposal is emitted, not what was drawn",
        "    return n, drawn",
        "    return n, drawn if x is None else x",
        "test_exact:test_joint_law_of_a_few_by_match",
    ),
    # --- 4-bit weights
    Mutant(
        "the halves of a byte exchanged",
        "unpacked[:, : GROUP // 2, :] = codes & 15",
        "unpacked[:, : GROUP // 2, :] = codes >> 4",
        PACKED,
        "model.py",
    ),
    Mutant(
        "one scale for all the groups",
        "y *= scale.astype(y.dtype)[:, None, :]",
        "y *= scale.astype(y.dtype)[:1, None, :]",
        PACKED,
        "model.py",
    ),
    Mutant(
        "minimum left out of a product",
        "return np.sum(y, axis=0) + np.matmul(sums, minimum.astype(y.dtype))",
        "return np.sum(y, axis=0)",
        PACKED,
        "model.py",
    ),
    Mutant(
        "codes cut, not rounded",
        "np.clip(np.rint(codes), 0, 2**bits - 1)",
        "np.clip(np.floor(codes), 0, 2**bits - 1)",
        "test_quantize:check_nearest_codes",
        "model.py",
    ),
    Mutant(
        "serial verification that is batched",
        "return np.concat([inner(x[i : i + 1, :], W) for i in range(x.shape[0])])",
        "return inner(x, W)",
        "test_quantize:check_serial_is_one_row_at_a_time",
        "model.py",
    ),
    # --- K by itself, and what lookup copies
    Mutant(
        "an adaptive K that counts the correction as accepted",
        "n = min(self.proposed, length - self.length)",
        "n = min(self.proposed, length - self.length + 1)",
        "test_adaptive:test_the_best_K_by_hand",
    ),
    Mutant(
        "an adaptive K that does not roll its drafter back",
        "        self.inner.keep(length)\n        if self.proposed",
        "        if self.proposed",
        "test_adaptive:test_its_drafter_is_rolled_back",
    ),
    Mutant(
        "a drafter that learns from another's proposals",
        "            self.accepted[:n] += 1\n        self.proposed = 0",
        "            self.accepted[:n] += 1",
        "test_adaptive:test_only_the_drafter_that_proposed_learns",
    ),
    Mutant(
        "of equally frequent continuations the first",
        "self.counts[ngram, x] < self.counts[ngram, None]",
        "self.counts[ngram, x] <= self.counts[ngram, None]",
        "test_sampling:test_frequent_lookup_by_hand",
    ),
]


# --- the harness --------------------------------------------------------------------------------


def edited(mutant):
    """The source of the mutant's file with its edit."""
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise LookupError(
            f"{mutant.fault}: {mutant.file} holds {source.count(mutant.old)} times, "
            f"not once: {mutant.old!r}"
        )
    return source.replace(mutant.old, mutant.new)


@contextlib.contextmanager
def time_limit():
    """TimeoutError after TIME_LIMIT seconds; none on Windows, which has no such signal."""

    def stop(*_):
        raise TimeoutError(f"no end within {TIME_LIMIT} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(mutant, source):
    """What the killer raises with `source` in the place of the mutant's file; None if it passes."""
    test, function = mutant.killer.split(":")
    test = importlib.import_module(test)  # first: it imports the real module, which dataclass needs
    name = Path(mutant.file).stem
    module = types.ModuleType(name)
    exec(compile(source, f"{mutant.file} ({mutant.fault})", "exec"), module.__dict__)
    with mock.patch.object(test, name, module), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with time_limit():
                getattr(test, function)()
        except FAILURES as failure:
            return failure
    return None


@functools.cache
def passes_unedited(killer, file):
    mutant = Mutant("unedited", "", "", killer, file)
    return run(mutant, (ROOT / file).read_text(encoding="utf-8")) is None


def verdict(mutant):  # -> "killed", or "SURVIVED"
    if not passes_unedited(mutant.killer, mutant.file):
        raise AssertionError(f"{mutant.killer} fails on the unedited {mutant.file}")
    return "SURVIVED" if run(mutant, edited(mutant)) is None else "killed"


def table(mutants):
    """Prints the kill table; returns how many survived."""
    survivors = 0
    for mutant in mutants:
        started = time.perf_counter()
        outcome = verdict(mutant)
        seconds = time.perf_counter() - started
        survivors += outcome == "SURVIVED"
        print(f"{outcome:9} {mutant.fault:52} {mutant.file:12} {seconds:5.2f} s  {mutant.killer}")
    print(f"{len(mutants)} mutants, {survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(1 if table(MUTANTS) else 0)
