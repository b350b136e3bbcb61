"""Every mistake that a certificate can see turns it red, and the row says what the register says.

The others are seen by tests of what they change; `minidist mutants` runs all tests against all.
"""

import pytest

from minidist.course.mutants import names
from minidist.verify import equivalence
from minidist.verify.causes import rerun
from minidist.verify.mistakes.register import find, mistakes
from tests.planted import planted

SEEN_BY = {
    "1f1b": "empty_schedule",
    "attention": "key_value_in_one_run qkv_heads_first qkv_in_equal_runs",
    "bucketed": "bucket_forgotten first_of_a_bucket_alone",
    "channel": "channels_without_g filters_without_f",
    "column": "f_averages f_and_g_swapped f_missing gather_sums_backward weights_seeded_by_shape",
    "downpour": "applied_twice buffer_forgets buffer_not_emptied recorded_version_off_by_one",
    "eight_bits": "scale_of_a_part strips_cross_examples",
    "expert": "balance_of_local_examples capacity_of_local_tokens experts_averaged"
    " gates_counted_as_experts places_of_the_first_sender"
    " rows_left_in_order_of_experts",
    "gathered_attention": "gathered_gradients_not_scattered gathered_queries_masked_as_the_first",
    "gpipe": "receive_buffer_reused skipped_last_micro_batch",
    "hybrid": "bias_in_every_partial_sum context_left_out_of_the_sum experts_summed_like_all_else"
    " gates_gradient_of_partial_sums masks_by_local_example mean_of_means own_count_of_targets"
    " same_batch_everywhere shared_expert_summed_twice",
    "int8": "same_draws_on_every_rank",
    "layer_split": "doubled_one_over_m mean_of_micro_batches missing_one_over_m"
    " scaled_at_every_stage tied_embedding_summed_twice untied_embedding",
    "local_sgd": "difference_with_the_wrong_sign local_rate_of_one_rank one_local_step_too_many"
    " outer_momentum_lost",
    "mixed_precision": "divided_by_the_next_scale draws_by_place_on_the_rank"
    " nearest_where_random_is_promised no_float32_copies overflow_decided_alone"
    " scale_not_divided_out skipped_step_counted",
    "muon": "first_elements_for_everyone shard_orthogonalised_alone",
    "naive": "divided_by_ranks_twice no_all_reduce one_parameter_forgotten rounded_to_float32"
    " weights_averaged",
    "parameter_server": "one_worker_left_out",
    "pipedream": "replicas_without_their_sum unstashed_weights",
    "power_sgd": "q_drawn_anew",
    "ring_attention": "documents_leak_across_ranks gradients_one_hop_short masked_by_local_rows"
    " own_keys_in_backward partial_softmaxes_added positions_counted_from_0_on_every_rank",
    "row": "bias_added_tp_times bias_missing",
    "sequence": "first_positions_everywhere layer_norm_not_reduced masks_by_local_position"
    " positions_not_summed sequence_gradient_not_summed sequence_not_gathered_again",
    "siamese": "branches_not_summed",
    "sign": "scale_of_rank_0",
    "spatial": "halo_from_the_wrong_side halo_gradients_not_added halo_gradients_not_sent_back"
    " head_summed_with_the_rest rows_normalised_by_themselves",
    "ssp": "third_push_lost",
    "streaming_diloco": "alpha_of_the_common_weights fragment_applied_at_once"
    " fragment_from_the_own_weights",
    "sync_batch_norm": "backward_sums_of_one_rank gain_summed_twice running_variance_by_own_count"
    " statistics_of_equal_shares",
    "top_k": "feedback_lost places_of_another_rank",
    "ulysses": "sequence_in_the_order_of_ranks",
    "vocab": "padding_in_the_vocabulary",
    "zb_h1": "weight_half_forgotten",
    "zero_1": "weights_not_gathered",
    "zero_2": "last_micro_batch_only",
}
PAIRS = [(strategy, name) for strategy, several in SEEN_BY.items() for name in several.split()]


def first_red_row(cluster, strategy, name):
    """Return the row of the first case that turns red, without a search in the register."""
    entry = equivalence.find(strategy)
    size = max(ranks for ranks in entry.ranks if ranks <= 3)
    for case in entry.cases(size):
        with planted(name):  # ranks are threads of this process
            ranks = cluster(size, "thread")
            row = equivalence.check(strategy, case, size, ranks, rerun=False)
        if not row["ok"]:
            return row
    raise AssertionError(f"{strategy} does not see {name}")


@pytest.mark.parametrize("strategy, name", PAIRS)
def test_a_mistake_turns_the_certificate_red_and_sums_show_their_cause(cluster, strategy, name):
    row, words = first_red_row(cluster, strategy, name), find(name).diagnosis
    assert words.startswith(rerun.NUMBERS) or words in row["detail"], row["detail"]


def test_a_version_that_was_made_after_its_use_is_refused(cluster):
    with pytest.raises(ValueError, match="no run can leave these logs"):
        first_red_row(cluster, "downpour", "newer_version_recorded")


def test_the_step_refuses_loads_of_one_rank_before_numbers_are_compared(cluster):
    with pytest.raises(ValueError, match=find("loads_of_one_rank").diagnosis):
        first_red_row(cluster, "expert", "loads_of_one_rank")


def test_what_the_register_is_searched_for_is_a_mutant_that_a_certificate_sees():
    searched = {name for name, m in mistakes().items() if m.diagnosis.startswith(rerun.NUMBERS)}
    for name in searched:
        assert mistakes()[name].diagnosis == f"{rerun.NUMBERS} {name}"
    assert searched <= set(names())
