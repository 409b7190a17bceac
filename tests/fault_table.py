"""Faults that void the guarantee, and the tests that must see them. `faults.py` plants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault, planted by exact replacement.

    Attributes:
        name: what is wrong then.
        file: the file it is planted in, below `hf_dpgrape/`.
        edits: old text, which the file has exactly once -> new text.
        tests: those that must fail, as `file::test` below `tests/`.
    """

    name: str
    file: str
    edits: Mapping[str, str]
    tests: tuple[str, ...]


SAMPLING = (
    Fault(
        "coins from `args.seed`",
        "hf/trainer.py",
        {
            "self._batches = LogicalBatches(**self._training_data())": (
                "from hf_dpgrape.privacy.randomness import SecretSource\n"
                "        public = SecretSource(unsafe_seed=self.args.seed)\n"
                "        data = {**self._training_data(), 'source': public}\n"
                "        self._batches = LogicalBatches(**data)"
            )
        },
        ("hf/test_counting.py::test_the_public_seed_does_not_draw_the_sample",),
    ),
    Fault(
        "coins from a public seed in a loop of one's own",
        "mechanism/logical_batches.py",
        {"generator=source.generator(),": "generator=torch.Generator().manual_seed(42),"},
        (
            "mechanism/test_private_training.py"
            "::test_a_public_seed_alone_does_not_decide_who_is_drawn",
        ),
    ),
    Fault(
        "coins in float32",
        "privacy/sampling/poisson.py",
        {"indices.double().uniform_(": "indices.float().uniform_("},
        ("privacy/test_sampling.py::test_rare_inclusions_have_their_probability",),
    ),
    Fault(
        "coins at 1.1 times the planned probability",
        "privacy/sampling/poisson.py",
        {"coins < self.sampling_prob": "coins < 1.1 * self.sampling_prob"},
        (
            "privacy/test_sampling.py::test_inclusion_rate",
            "hf/test_counting.py::test_the_loader_draws_at_the_planned_rate",
        ),
    ),
    Fault(
        "an empty draw skipped",
        "privacy/sampling/sampler.py",
        {
            "            yield self.sampling.draw(self.indices, self.generator).tolist()": (
                "            if drawn := self.sampling.draw(self.indices, self.generator).tolist():"
                "\n                yield drawn"
            )
        },
        ("privacy/test_sampling.py::test_empty_batches_occur_as_often_as_they_should",),
    ),
    Fault(
        "every process draws among the same examples",
        "mechanism/logical_batches.py",
        {"rank=distributed.get_rank() if parallel else 0,": "rank=0,"},
        ("mechanism/test_noise_over_processes.py::test_every_example_is_drawn_by_one_process",),
    ),
    Fault(
        "a sample that is cut keeps the first examples",
        "privacy/sampling/truncated_poisson.py",
        {"kept = keys.argsort()[": "kept = keys.argsort().sort().values["},
        ("privacy/test_sampling.py::test_sizes_and_subsets_have_their_law",),
    ),
    Fault(
        "a sample that is cut is accounted as if it were not",
        "privacy/sampling/truncated_poisson.py",
        {".events(noise_multiplier), *truncated)": ".events(noise_multiplier),)"},
        (
            "privacy/test_truncated_accounting.py"
            "::test_epsilon_is_dp_accountings_of_the_worse_neighbor",
        ),
    ),
)

DATA = (
    Fault(
        "the examples of a step collated together",
        "mechanism/logical_batches.py",
        {
            "inputs = [self._inputs(*both) for both in zip(indices, seeds, strict=True)]": (
                "drawn = [self.examples[index] for index in indices]\n"
                "        joint = self.collate(drawn) if drawn else {}\n"
                "        inputs = [\n"
                "            {name: v[row : row + 1] for name, v in joint.items()}\n"
                "            for row in range(len(drawn))\n"
                "        ]"
            )
        },
        (
            "hf/test_data.py::test_tensors_do_not_depend_on_who_is_drawn_beside",
            "mechanism/test_private_training.py::test_each_example_is_collated_alone",
        ),
    ),
    Fault(
        "the last, incomplete physical batch dropped",
        "mechanism/logical_batches.py",
        {"range(0, len(group), self._size)": "range(0, len(group) + 1 - self._size, self._size)"},
        ("hf/test_data.py::test_physical_batches_are_full_but_for_one_of_each_shape",),
    ),
    Fault(
        "generators not seeded anew for each example",
        "mechanism/logical_batches.py",
        {"        reseed_cpu_(seeds)\n": ""},
        ("hf/test_data.py::test_masks_of_an_example_do_not_move_with_those_before_it",),
    ),
    Fault(
        "generators not seeded anew before the model takes an example alone",
        "mechanism/logical_batches.py",
        {"            reseed_global_(part.seeds)": "            pass"},
        ("mechanism/test_private_training.py::test_an_example_taken_alone_has_its_own_draws",),
    ),
    Fault(
        "a collator keeps attributes for the next example",
        "mechanism/collation.py",
        {"copied = copy.copy(collate)": "copied = collate"},
        ("hf/test_data.py::test_tensors_do_not_depend_on_who_is_drawn_beside",),
    ),
    Fault(
        "a collator's own seed accepted",
        "mechanism/own_generators.py",
        {"callable(held) and seed is not None:": "callable(held) and seed is Ellipsis:"},
        ("hf/test_own_generators.py::test_seeds_of_collators_are_refused",),
    ),
    Fault(
        "a collator's own generator accepted",
        "mechanism/own_generators.py",
        {"if isinstance(held, _GENERATORS):": "if held is Ellipsis:"},
        ("hf/test_own_generators.py::test_generators_are_found_in_collators",),
    ),
)

UNITS = (
    Fault(
        "the rows of a unit chosen once for all steps",
        "mechanism/units.py",
        {"manual_seed(seeds.seed())": "manual_seed(0)"},
        ("mechanism/test_units.py::test_at_most_so_many_rows_are_taken_anew_at_every_step",),
    ),
    Fault(
        "all rows of a unit taken",
        "mechanism/units.py",
        {"len(rows) > self.max_rows": "False"},
        ("mechanism/test_units.py::test_at_most_so_many_rows_are_taken_anew_at_every_step",),
    ),
    Fault(
        "rows of a unit divided by nothing",
        "mechanism/unit_mean.py",
        {"1 / self._num_rows": "1.0"},
        ("mechanism/test_units.py::test_a_units_part_is_its_own_mean_gradient_clipped",),
    ),
    Fault(
        "what the model draws for a unit goes on from the unit before",
        "mechanism/logical_batches.py",
        {"_joined(part), own)": "_joined(part))"},
        ("mechanism/test_units.py::test_a_unit_more_or_less_moves_the_sum_by_its_own_part_alone",),
    ),
    Fault(
        "rows of a unit clipped one by one",
        "mechanism/private_step.py",
        {
            "                unit.add(self._estimated(part, per_sample_losses, names, unit))": (
                "                for i in range(part.num_samples):\n"
                "                    row = {k: v[i : i + 1] for k, v in part.inputs.items()}\n"
                "                    one = PhysicalBatch(1, row)\n"
                "                    w = when_complete\n"
                "                    clipped = ClippedSum(\n"
                "                     self.ledger.plan, dict(w._groups), w._clip_shares, w._sums\n"
                "                    )\n"
                "                    e = self._estimated(one, per_sample_losses, names, clipped)\n"
                "                    clipped.finish(e.vectors)\n"
                "                    unit._losses.append(e.losses)"
            )
        },
        ("mechanism/test_units.py::test_rows_of_one_unit_add_up_before_they_are_clipped",),
    ),
    Fault(
        "a unit's column reaches the collator",
        "mechanism/logical_batches.py",
        {"row if self._units is None else self._units.without_column(row)": "row"},
        ("hf/test_privacy_units.py::test_all_kinds_of_data_sets_train_alike",),
    ),
    Fault(
        "rows counted in the place of units",
        "hf/planning.py",
        {"num_rows if units is None else len(units)": "num_rows"},
        ("hf/test_privacy_units.py::test_the_plan_is_that_of_so_many_units",),
    ),
    Fault(
        "rows clipped one by one under a plan for units",
        "mechanism/private_step.py",
        {"            _refuse_other_kind(drawn, plan)\n": ""},
        ("mechanism/test_units.py::test_rows_in_the_place_of_units_are_refused",),
    ),
    Fault(
        "a row's draws by its index in the training set only",
        "mechanism/logical_batches.py",
        {"ExampleSeeds(key, index, place) for": "ExampleSeeds(key, place) for"},
        ("mechanism/test_units.py::test_rows_have_draws_of_their_own",),
    ),
)

GRADIENTS = (
    Fault(
        "the wrong side projected",
        "subspace/projection.py",
        {'return "right" if rows >= columns': 'return "right" if rows < columns'},
        ("subspace/test_projection.py::test_shapes",),
    ),
    Fault(
        "the projection computed from the examples (by SVD)",
        "subspace/projection.py",
        {
            'return factor @ self.matrix.to(factor.dtype) if self.side == "right" else factor': (
                'if self.side != "right":\n'
                "            return factor\n"
                "        rows = factor.reshape(-1, factor.shape[-1])\n"
                "        return factor @ torch.linalg.svd(rows).Vh[: self.rank].T"
            )
        },
        ("gradients/test_rules.py::test_layer",),
    ),
    Fault(
        "the projection drawn from the global generator",
        "subspace/projection.py",
        {"torch.randn(shrunk, self.rank, generator=generator)": "torch.randn(shrunk, self.rank)"},
        ("subspace/test_projection.py::test_matrix_depends_on_public_numbers_alone",),
    ),
    Fault(
        "one of two gradients of a tied tensor dropped",
        "gradients/forms.py",
        {"parts = self._parts.setdefault(name, [])": "parts = self._parts[name] = []"},
        ("gradients/test_exactness.py::test_forms_and_full_space",),
    ),
    Fault(
        "reduced precision in the norms",
        "gradients/forms.py",
        {"with full_float32(like.device):": "if True:"},
        ("gradients/test_gradients.py::test_precision_settings_change_nothing",),
    ),
    Fault(
        "reduced precision (TF32, bfloat16) in the weighted sum",
        "gradients/forms.py",
        {"with full_float32(out.device):": "if True:"},
        ("gradients/test_gradients.py::test_precision_settings_change_nothing",),
    ),
    Fault(
        "norms by Gram matrices without their margin",
        "gradients/norm_bounds.py",
        {"exact = (gram_form + error).sqrt()": "exact = gram_form.clamp(min=0).sqrt()"},
        ("gradients/test_gradients.py::test_cancelling_positions_are_within_the_bound",),
    ),
    Fault(
        "norms without the margin for roundings of the sum",
        "gradients/norm_bounds.py",
        {" + gamma(positions + num_parts + 2, unit) * total": ""},
        ("gradients/test_gradients.py::test_long_sums_that_round_up_are_within_the_bound",),
    ),
    Fault(
        "rows of a layer not checked",
        "gradients/recorder.py",
        {
            "return rows == 0 or (tensor.ndim > 0 and tensor.shape[0] == rows * batch_size)": (
                "return True"
            )
        },
        ("gradients/test_recorder.py::test_other_rows_than_observed_are_refused",),
    ),
    Fault(
        "buffers not watched",
        "gradients/recorder.py",
        {"stack.enter_context(unmoved_buffers(self._model))": "pass"},
        ("gradients/test_recorder.py::test_a_buffer_that_moves_is_refused",),
    ),
    Fault(
        "what the rehearsal finds is ignored",
        "mechanism/checks.py",
        {"refuse(model, found.problems, way_out)": "refuse(model, {}, way_out)"},
        (
            "mechanism/test_private_training.py::test_a_model_that_mixes_examples_is_refused",
            "hf/test_one_example.py::test_models_whose_samples_meet",
        ),
    ),
    Fault(
        "samples' rows not watched in the rehearsal",
        "gradients/rehearsal.py",
        {
            "            or self._mixing(batch, layouts)\n": "",
            "            or self._moved_by_others(batch, together, layouts)\n": "",
        },
        ("gradients/test_rehearsal.py::test_planted_faults_are_found",),
    ),
    Fault(
        "a sample's loss divided by the labels of the batch",
        "hf/task_losses.py",
        {
            "(labels != IGNORED).sum(1).clamp(min=1)": "(labels != IGNORED).sum().clamp(min=1)",
        },
        ("gradients/test_exactness.py::test_loss_does_not_move_with_the_neighbors",),
    ),
    Fault(
        "a loss that is no vector of one per sample accepted",
        "mechanism/private_step.py",
        {"if losses.shape != (num_samples,):": "if False:"},
        ("mechanism/test_private_step.py::test_refuses_what_is_not_one_loss_per_sample",),
    ),
)

CLIPPING = (
    Fault(
        "clipped after the sum",
        "mechanism/private_step.py",
        {
            "self._sums[name], factors)\n            gradients.discard(name)\n": (
                "self._sums[name], torch.ones_like(factors))\n"
                "            gradients.discard(name)\n"
                "        norms = torch.stack([self._sums[name].norm() for name in names])\n"
                "        bound = self._plan.l2_clip_norm * self._clip_shares[group]\n"
                "        for name in names:\n"
                "            self._sums[name].mul_((bound / norms.norm()).clamp(max=1.0))\n"
            )
        },
        ("mechanism/test_private_step.py::test_one_sample_moves_the_sum_by_at_most_the_clip_norm",),
    ),
    Fault(
        "the head clipped to the whole clip norm beside the body",
        "mechanism/private_step.py",
        {
            "bound=self._plan.l2_clip_norm * self._clip_shares[group],": (
                "bound=self._plan.l2_clip_norm\n"
                "            * (1.0 if group == HEAD else self._clip_shares[group]),"
            )
        },
        ("mechanism/test_private_step.py::test_bound_holds_for_groups_and_kinds",),
    ),
    Fault(
        "shares of clip groups that exceed the clip norm accepted",
        "privacy/plan.py",
        {"positive and abs(total - 1) <= 1e-9": "positive"},
        ("privacy/test_plan.py::test_refusals",),
    ),
    Fault(
        "clip factors without the margin for their own roundings",
        "privacy/clipping.py",
        {"    bound *= 1 - _ROUNDING_MARGIN\n": ""},
        ("privacy/test_clipping.py::test_factors_are_rounded_down",),
    ),
    Fault(
        "a gradient that is not finite not dropped",
        "gradients/forms.py",
        {"keep = weights != 0": "keep = torch.ones_like(weights, dtype=torch.bool)"},
        ("mechanism/test_private_step.py::test_poisoned_sample_contributes_nothing",),
    ),
    Fault(
        "the released loss not clamped",
        "mechanism/private_step.py",
        {".clamp(-bound, bound)": ""},
        (
            "mechanism/test_private_step.py"
            "::test_one_sample_moves_gradient_and_loss_by_at_most_the_clip_norm",
        ),
    ),
    Fault(
        "divided by the number of examples drawn",
        "mechanism/private_step.py",
        {
            "total.div_(plan.expected_batch_size)": (
                "total.div_(max(1, sum(part.num_samples for part in logical_batch)))"
            )
        },
        ("mechanism/test_private_step.py::test_noise_once_with_public_divisor",),
    ),
)

NOISE = (
    Fault(
        "noise for each physical batch",
        "mechanism/private_step.py",
        {
            "        self._add_noise_once_(released)": (
                "        for _ in logical_batch:\n            self._add_noise_once_(released)"
            )
        },
        (
            "mechanism/test_private_step.py::test_noise_once_with_public_divisor",
            "hf/test_training.py::test_one_noise_draw_per_step",
        ),
    ),
    Fault(
        "no noise where no example was drawn",
        "mechanism/private_step.py",
        {
            "        self._add_noise_once_(released)": (
                "        if any(total.any() for total in released):\n"
                "            self._add_noise_once_(released)"
            )
        },
        (
            "mechanism/test_private_step.py::test_noise_once_with_public_divisor",
            "hf/test_training.py::test_update_without_examples_is_noise_of_the_planned_size",
        ),
    ),
    Fault(
        "noise by every process",
        "mechanism/private_step.py",
        {"is_first = not parallel or distributed.get_rank() == 0": "is_first = True"},
        ("mechanism/test_noise_over_processes.py::test_noise_is_added_once",),
    ),
    Fault(
        "noise by no process of several",
        "mechanism/private_step.py",
        {"is_first = not parallel or distributed.get_rank() == 0": "is_first = not parallel"},
        ("mechanism/test_noise_over_processes.py::test_noise_is_added_once",),
    ),
    Fault(
        "rounding not counted in secure noise",
        "privacy/secure_noise.py",
        {"(1 - rounding) * (1 + _ROUNDING_MARGIN)": "(1 + _ROUNDING_MARGIN)"},
        (
            "privacy/test_secure_noise.py::"
            "test_noise_covers_the_rounding_and_is_never_below_the_plans",
        ),
    ),
    Fault(
        "secure noise of one key in every release",
        "mechanism/private_step.py",
        {"CipherStream(self._source.key())": "CipherStream(bytes(32))"},
        ("mechanism/test_private_step.py::test_secure_noise_is_the_planned_one_on_a_grid",),
    ),
    Fault(
        "noise divided by the root of the number of clip groups",
        "privacy/plan.py",
        {
            "return self.noise_multiplier * self.l2_clip_norm": (
                "return self.noise_multiplier * self.l2_clip_norm / len(self.clip_shares) ** 0.5"
            )
        },
        (
            "mechanism/test_private_step.py"
            "::test_noise_of_every_group_is_that_of_the_whole_clip_norm",
        ),
    ),
    Fault(
        "noise of each group by its share of the clip norm",
        "mechanism/private_step.py",
        {
            "noise_stddev=self.ledger.plan.noise_stddev,": (
                "noise_stddev=self.ledger.plan.noise_stddev\n"
                "                    * min(self.ledger.plan.clip_shares.values()),"
            )
        },
        (
            "mechanism/test_private_step.py"
            "::test_noise_of_every_group_is_that_of_the_whole_clip_norm",
        ),
    ),
    Fault(
        "the same noise for all tensors",
        "mechanism/private_step.py",
        {
            "generator=generators[total.device],": (
                "generator=generators[total.device].manual_seed(\n"
                "                        generators[total.device].initial_seed()\n"
                "                    ),"
            )
        },
        ("mechanism/test_private_step.py::test_no_two_coordinates_share_their_noise",),
    ),
    Fault(
        "noise drawn in float32",
        "privacy/noise.py",
        {
            "torch.empty(chunk.shape, dtype=torch.float64": (
                "torch.empty(chunk.shape, dtype=torch.float32"
            )
        },
        ("privacy/test_noise.py::test_noise_is_drawn_in_float64_and_rounded_once",),
    ),
    Fault(
        "noise from a public seed",
        "mechanism/private_step.py",
        {
            "= self._source.generator(total.device)": (
                "= torch.Generator(total.device).manual_seed(42 + step)"
            ),
            "self._add_noise_once_(released)": "self._add_noise_once_(released, step)",
            "def _add_noise_once_(self, sums: Sequence[Tensor]) -> None:": (
                "def _add_noise_once_(self, sums: Sequence[Tensor], step: int) -> None:"
            ),
        },
        ("mechanism/test_private_training.py::test_a_public_seed_alone_does_not_decide_the_noise",),
    ),
    Fault(
        "noise from a generator that is seeded alike at every step",
        "mechanism/private_step.py",
        {
            "= self._source.generator(total.device)": (
                "= torch.Generator(total.device).manual_seed(42)"
            )
        },
        ("mechanism/test_private_step.py::test_two_steps_have_independent_noise",),
    ),
    Fault(
        "all of a run's randomness from `args.seed`",
        "hf/training_data.py",
        {"unsafe_seed=None if fixed is None else": ("unsafe_seed=args.seed if fixed is None else")},
        ("hf/test_training.py::test_runs_differ_unless_a_test_fixes_the_seed",),
    ),
    Fault(
        "dropout from a public seed at every step",
        "mechanism/private_training.py",
        {
            "with secret_global_randomness(self._source):": (
                "with secret_global_randomness(SecretSource(unsafe_seed=self._space.seed)):"
            )
        },
        ("hf/test_counting.py::test_a_seed_that_a_callback_sets_does_not_reach_dropout",),
    ),
    Fault(
        "secret seeds from Python's global generator",
        "privacy/randomness.py",
        {"return secrets.randbits(_SEED_BITS)": "return random.getrandbits(_SEED_BITS)"},
        ("privacy/test_randomness.py::test_secret_seeds_ignore_the_global_generators",),
    ),
)

COUNTING = (
    Fault(
        "a release counted after its noise",
        "mechanism/private_step.py",
        {
            "step, plan = self.ledger.count_release(),": "step, plan = self.ledger.num_releases,",
            "self._add_noise_once_(released)": (
                "self._add_noise_once_(released)\n        self.ledger.count_release()"
            ),
        },
        ("mechanism/test_private_step.py::test_an_interrupted_step_is_counted",),
    ),
    Fault(
        "one step more than planned",
        "privacy/ledger.py",
        {"if index >= planned:": "if index > planned:"},
        (
            "privacy/test_ledger.py::test_no_release_after_the_planned_ones",
            "mechanism/test_private_step.py::test_stops_at_the_planned_steps",
        ),
    ),
    Fault(
        "a resumed run forgets its steps",
        "privacy/ledger.py",
        {
            "self._num_releases = num_releases\n        self._earlier_runs = (*earlier_runs,": (
                "self._num_releases = 0\n        self._earlier_runs = (*earlier_runs,"
            )
        },
        ("privacy/test_ledger.py::test_a_resumed_run_goes_on_counting",),
    ),
    Fault(
        "a checkpoint's steps are not read",
        "hf/resuming.py",
        {"    ledger.resume(done, reasons": "    ledger.resume(0, reasons"},
        ("hf/test_training.py::test_interrupted_run_counts_and_can_be_resumed",),
    ),
    Fault(
        "resumed with another noise multiplier",
        "privacy/plan.py",
        {
            "if mine[key] != theirs[key]": (
                'if mine[key] != theirs[key] and key != "noise_multiplier"'
            )
        },
        (
            "privacy/test_plan.py::test_every_difference_is_named",
            "hf/test_training.py::test_changed_plan_is_refused",
        ),
    ),
    Fault(
        "a run that ends early counts the steps that it took",
        "privacy/ledger.py",
        {"if 0 < self._num_releases < self._plan.num_steps:": "if False:"},
        ("privacy/test_ledger.py::test_an_early_end_counts_all_steps",),
    ),
    Fault(
        "epsilon of one step less in the accountant",
        "privacy/accounting.py",
        {"SelfComposedDpEvent(event, steps)": "SelfComposedDpEvent(event, max(steps - 1, 1))"},
        ("privacy/test_accounting.py::test_published_figures",),
    ),
    Fault(
        "epsilon of one step less in the ledger",
        "privacy/ledger.py",
        {
            "return self._plan.epsilon(self.steps_counted(num_releases), accountant)": (
                "counted = self.steps_counted(num_releases)\n"
                "        return self._plan.epsilon(max(counted - 1, 0), accountant)"
            )
        },
        ("privacy/test_ledger.py::test_a_run_counts_its_releases",),
    ),
    Fault(
        "several examples of an owner counted as one",
        "privacy/sampling/poisson.py",
        {"[float(j) for j in counts]": "[float(min(j, 1)) for j in counts]"},
        ("privacy/test_accounting.py::test_owners_of_several_examples_spend_more",),
    ),
    Fault(
        "the raw loss logged",
        "hf/disclosure.py",
        {"value = logs.pop(name)": "value = logs[name]"},
        ("hf/test_training.py::test_logs_hold_epsilon_and_no_raw_loss",),
    ),
    Fault(
        "the raw loss handed to the Trainer",
        "hf/disclosure.py",
        {
            "raw_sum = loss.raw_sum if self._is_asked_for else torch.zeros(())": (
                "raw_sum = loss.raw_sum"
            )
        },
        ("hf/test_training.py::test_the_trainer_sees_no_raw_loss_unless_asked_for",),
    ),
)

ESTIMATORS = (
    Fault(
        "a loss difference relative to the batch's mean",
        "mechanism/estimators/zeroth_order.py",
        {
            "Dense(((plus - minus) / (2 * self._scale)).to(like))": (
                "Dense(((plus - minus - (plus - minus).mean(0)) / (2 * self._scale)).to(like))"
            )
        },
        ("mechanism/test_estimators.py::test_a_sample_has_its_slopes_along_the_directions",),
    ),
    Fault(
        "dropout that differs between the passes of zeroth order",
        "mechanism/estimators/zeroth_order.py",
        {"with nullcontext() if is_last else global_randomness_restored():": "with nullcontext():"},
        (
            "mechanism/test_estimators.py::test_all_passes_draw_the_same_and_the_next_batch_other_numbers",
        ),
    ),
    Fault(
        "weights left where zeroth order looked",
        "mechanism/estimators/zeroth_order.py",
        {
            "                for name, weight in self.weights.items():\n"
            "                    weight.copy_(originals[name])": "                pass"
        },
        ("mechanism/test_estimators.py::test_weights_come_back_bit_for_bit",),
    ),
)

FAULTS = (*SAMPLING, *DATA, *UNITS, *GRADIENTS, *CLIPPING, *NOISE, *COUNTING, *ESTIMATORS)
