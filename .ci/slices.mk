# What CI runs of each long word (`make WORD SLICE=1`): a small fixed part, chosen so that every mechanism that the word
# tests is met once. `make nightly` runs the words whole. A test named here that no longer exists fails the word.

# Damage, attacks, forms, both kinds of storage, publishing under kills, resuming from an older one; weights in and out.
SLICE_CHECKPOINTS := tests/checkpoint/test_saving.py tests/checkpoint/test_attacks.py \
	tests/checkpoint/test_damaged.py::test_no_flipped_bit_goes_unnoticed \
	tests/checkpoint/test_drafts.py::test_a_kill_after_any_step_leaves_a_checkpoint \
	tests/checkpoint/test_bucket.py::test_the_commands_take_urls \
	tests/checkpoint/test_resuming_from.py::test_a_run_goes_on_from_an_older_one_and_says_so_on_every_rank \
	tests/checkpoint/test_several_runs.py tests/checkpoint/test_falling_back.py \
	tests/runner/test_resume_own_states.py::test_they_come_back_whole_on_two_ranks \
	tests/runner/test_resumed_options.py::test_options_that_the_config_changes_hold \
	tests/runner/test_position.py::test_the_rest_of_an_epoch_is_dealt_anew \
	tests/weights/test_export.py::test_each_form_holds_what_was_trained tests/weights/test_loading.py

# Units of FSDP and ranks that use different ones, dtypes, tensor parallelism, a compiled model, states of optimizers; of
# the bodies of the GPU tests one of each kind.
SLICE_LAYOUTS := tests/model/fsdp/test_wrapper.py::test_no_sync_reduces_nothing_until_the_window_ends \
	tests/model/fsdp/test_consistency.py::test_ranks_that_use_different_layers_of_one_shape_are_refused \
	tests/model/fsdp/test_consistency.py::test_a_parameter_without_gradient_on_every_rank_has_none_and_others_get_zeros \
	tests/strategy/test_fsdp.py::test_a_checkpoint_of_one_strategy_is_loaded_by_another \
	tests/strategy/test_fsdp_dtypes.py::test_units_are_cut_by_dtype_and_scalars_stay_whole \
	tests/strategy/test_fsdp_refusals.py tests/strategy/test_optimizer_trial.py \
	"tests/gpu/test_bodies.py::test_a_collective_gives_what_it_should[all_reduce, sum-2]" \
	"tests/gpu/test_bodies.py::test_losses_are_those_of_a_plain_loop_on_the_cpu[fsdp-accumulating-2]" \
	"tests/gpu/test_bodies.py::test_a_run_goes_on_as_if_it_had_not_stopped[fsdp-None-async]" \
	"tests/gpu/test_bodies.py::test_a_rank_that_goes_wrong_is_named_on_all_others[another op]" \
	tests/strategy/test_tensor_parallel.py::test_a_checkpoint_is_loaded_under_any_layout \
	tests/strategy/test_compile.py::test_a_model_that_its_user_has_compiled_has_no_other_names \
	tests/strategy/test_optim_state.py::test_ranks_go_on_as_if_they_had_not_stopped \
	tests/strategy/test_optim_state.py::test_other_strategies_find_as_few_states_as_were_saved

# Each launcher once, two hosts, the commands, a signal, a search, an example, a first line before torch is loaded.
SLICE_JOBS := tests/benchmarks/test_benchmarks.py::test_calls_beside_bare_torch tests/launch/test_ledger.py \
	tests/launch/test_launch.py::test_a_failure_is_told_once_with_the_rank_and_its_traceback \
	tests/launch/test_launch.py::test_a_killed_rank_is_replaced \
	tests/launch/test_launch.py::test_no_rank_outlives_the_job \
	tests/launch/test_torchrun.py::test_lockstep_train_joins_the_ranks_it_finds \
	tests/launch/test_mpirun.py::test_lockstep_train_joins_the_ranks_it_finds \
	tests/launch/test_slurm.py::test_two_nodes_train tests/launch/test_hosts.py::test_two_hosts_train_together \
	tests/launch/test_listening.py::test_lockstep_train_on_two_ranks_listens_on_loopback_alone \
	tests/cli/test_train.py::test_two_ranks_are_started_and_train \
	"tests/cli/test_secrets.py::test_what_a_run_leaves_has_no_secrets[2]" \
	tests/cli/test_secrets.py::test_messages_about_a_config_have_no_secrets \
	tests/launch/test_odd_errors.py \
	tests/cli/test_bad_input.py::test_a_hook_that_raises_on_one_rank_is_told_as_the_cause \
	tests/cli/test_evaluate.py::test_two_ranks_give_the_same_table_once \
	tests/cli/test_export.py::test_what_is_written_is_said \
	tests/examples/test_examples.py::test_a_hook_and_a_metric_of_ones_own \
	"tests/runner/test_preemption.py::test_a_signal_to_one_rank_stops_all_after_the_same_iteration[fsdp-1]" \
	"tests/runner/test_preemption.py::test_a_session_stops_and_goes_on[2-when2]" \
	tests/runner/test_failing_ranks.py::test_a_job_that_fails_says_why_and_ends \
	tests/runner/test_data_workers.py::test_a_rank_whose_worker_fails_in_a_validation_ends_by_itself

# What each call costs on a device, NCCL's rules, a step's waits, a hang, calls that differ, and a rank that is lost.
SLICE_DEVICE := tests/device/test_device.py tests/device/test_rules.py tests/device/test_loop.py \
	"tests/device/test_examples.py::test_a_config_is_trained[digits]" \
	"tests/device/test_examples.py::test_a_script_trains[own_loop/gan.py fsdp]" \
	"tests/device/test_watch.py::test_who_is_at_fault_is_named[op-reading]" \
	"tests/device/test_watch.py::test_who_is_at_fault_is_named[late-reading]" \
	"tests/device/test_watch.py::test_calls_that_end_because_a_rank_is_gone_do_not_pass_for_complete[dead-0-nothing]" \
	"tests/device/test_watch.py::test_calls_that_end_because_a_rank_is_gone_do_not_pass_for_complete[ddp, dead-1-reading]"

# Of each place in which a rank may fail, one way; calls that differ; who is named; ranks that go apart or are slow.
SLICE_FAULTS := "tests/faults/test_blame.py::test_errors_and_exits_in_a_collective[raises in all_reduce-2]" \
	"tests/faults/test_blame.py::test_signals_and_hangs_in_a_collective[SIGKILL in all_reduce-2]" \
	"tests/faults/test_blame.py::test_in_calls_that_differ[op in calls-2]" \
	"tests/faults/test_survivors.py::test_in_a_collective[endless loop in all_reduce-2]" \
	"tests/faults/test_survivors.py::test_in_a_backward_pass[raises in DDP's backward pass-2]" \
	"tests/faults/test_survivors.py::test_in_a_backward_pass[SIGKILL in FSDP's backward pass-2]" \
	"tests/faults/test_survivors.py::test_in_a_training[raises in hook-2]" \
	"tests/faults/test_survivors.py::test_in_a_training[no space for it in save-2]" \
	"tests/faults/test_survivors.py::test_in_calls_that_differ[keys in calls-2]" \
	"tests/faults/test_survivors.py::test_of_thirty_two_ranks[SIGKILL in all_reduce]" \
	"tests/faults/test_mismatch.py::test_every_rank_raises_and_shows_the_calls[dtype-sample]" \
	tests/faults/test_divergence.py::test_ranks_with_the_same_shard_are_compared \
	tests/faults/test_elastic.py::test_it_goes_on_with_the_ranks_that_are_left \
	tests/faults/test_stragglers.py::test_it_is_told_once_and_when_it_ends

# Every stage or plugin against one process, a state that goes through other strategies, a loop by hand, refusals.
SLICE_DEEPSPEED := tests/engines/deepspeed/test_parity.py::test_losses_and_gradient_norms_are_those_of_one_process \
	tests/engines/deepspeed/test_own_steps.py::test_a_train_step_of_the_models_own_is_the_one_that_runs \
	tests/engines/deepspeed/test_state.py::test_a_checkpoint_of_one_strategy_is_loaded_by_another \
	tests/engines/deepspeed/test_session.py::test_every_stage_computes_what_torch_does \
	tests/engines/deepspeed/test_parameters.py::test_who_gets_no_gradient_is_named_once \
	tests/engines/deepspeed/test_written.py::test_what_is_written_into_the_weights_is_trained_on \
	tests/engines/deepspeed/test_refusals.py
SLICE_COLOSSALAI := tests/engines/colossalai/test_parity.py::test_losses_and_global_gradient_norms_are_those_of_one_process \
	tests/engines/colossalai/test_own_steps.py::test_a_train_step_of_the_models_own_is_the_one_that_runs \
	tests/engines/colossalai/test_session.py::test_every_plugin_computes_what_torch_does \
	tests/engines/colossalai/test_states.py::test_a_checkpoint_of_pytorchs_strategies_is_resumed_and_the_other_way_round \
	tests/engines/colossalai/test_unused.py::test_what_only_an_earlier_batch_of_a_window_reaches_is_trained \
	tests/engines/colossalai/test_written.py::test_what_is_written_into_the_weights_is_trained_on \
	tests/engines/colossalai/test_strategy.py::test_models_that_would_go_wrong_are_refused_with_the_alternative

# A transformer, and two optimizers; each engine, once in shards. Weights that a hook writes are tested with each engine.
SLICE_MODELS := --rows "Llama, GQA" GAN --columns single DDP-2 FSDP-2 ZeRO-3 "ColossalAI ZeRO-1"
# The tests of FSDP and of DeepSpeed compare losses, and checkpoints of one strategy under another, themselves.
SLICE_PARITY := --out work_dirs/parity.md DDP-2 "ColossalAI zero1"
SLICE_RESUME := --rows DDP-2 FSDP-3 --loops "by epoch" --ranks 1 2
SLICE_DOCS := tests/pages -k "first-steps or own-loop or checkpoints or public_name or markup"

# On two ranks without workers; the splitting over workers is also tested without the packages, in `make test`.
SLICE_DATA_PACKAGES := -k "2-0"
