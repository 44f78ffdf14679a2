"""`train_head`: a head of any target, end to end.

data ─► the target's own text ─► head, on the target's hidden states ─► evaluation ─► a directory of its own
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from pilotfish.errors import ParameterError
from pilotfish.model.heads.export import export_head
from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.spec import FINAL, Decoder, Head, HeadFiles, HeadSpec, Projection
from pilotfish.model.heads.target import TargetFacts, TrainedOn
from pilotfish.progress import PhaseProgress, PlannedPhase
from pilotfish.train.evaluate import EVALUATION, HeadEvaluation, evaluate_head
from pilotfish.train.heads.block import BlockTrainee
from pilotfish.train.heads.recurrent import RecurrentTrainee
from pilotfish.train.heads.trainee import ParallelTrainee, Shared, Trainee, start
from pilotfish.train.recipes import HeadRecipe
from pilotfish.train.taught_target import TaughtTarget, Teacher, learn
from pilotfish.train.text.data import TokenBatch, Tokens, mixed
from pilotfish.train.text.lessons import HELD_OUT_ROWS, plan_lessons, plan_text, write_lessons
from pilotfish.train.text.passages import read_passages
from pilotfish.train.trainer import Learnt, Schedule, Trainer, claim, training_device

#: Not for Muon: they stand for single tokens, or give one number.
OF_TOKENS = ("markov", "confidence", "lm_head")


def train_head(
    recipe: HeadRecipe, out: Path, run: Path, progress: PhaseProgress, device: str = "auto"
) -> HeadEvaluation:
    """Into `out/head`; `run` keeps what resuming needs."""
    with progress.phase("loading the target"):
        target = TaughtTarget(recipe.target, training_device(device))
    if recipe.draft_vocab >= target.config.vocab_size:
        raise ParameterError("draft_vocab", recipe.draft_vocab, f"less than the target's {target.config.vocab_size}")
    head = head_of(recipe, target)
    claim(run, recipe)
    texts = read_passages(recipe, target, progress)
    trial = HeadTraining.of(recipe, head, target, torch.arange(recipe.draft_vocab))  # the text will tell which tokens
    batch = trial.batch(TokenBatch.blank(recipe.batch_rows, recipe.sequence_length), 0)
    planned = trial.trainer(run).plan(batch, progress)
    written = plan_text(HELD_OUT_ROWS, recipe.sequence_length)
    scored = PlannedPhase(EVALUATION, 2 * written.units / recipe.sequence_length)
    progress.plan(plan_lessons(recipe, run), planned, written, written, scored)
    lessons = write_lessons(texts, recipe, target, run, progress)
    text = np.concatenate([windows.tokens for windows in lessons.windows])
    training = HeadTraining.of(recipe, head, target, most_frequent(text, recipe.draft_vocab))
    trainer = training.trainer(run)
    trainer.run(lambda step: training.batch(mixed(lessons.windows, step), step), progress)
    result = evaluate_head(training.trainee, training.teacher, lessons, recipe.depth, progress)
    with progress.phase("writing the head"):
        files = trained_files(training.trainee, head, recipe, target, training.teacher.draft_ids)
        write_head(files, recipe, out / "head")
    return result


@dataclass(frozen=True)
class HeadTraining:
    recipe: HeadRecipe
    trainee: Trainee
    teacher: Teacher

    @classmethod
    def of(cls, recipe: HeadRecipe, head: Head, target: TaughtTarget, said: Tensor) -> "HeadTraining":
        """`said`: the tokens that the head can say; none: all."""
        draft_ids = said.to(target.device) if len(said) else None
        teacher = Teacher(target, head.projection.layers, draft_ids)
        return cls(recipe, trainee_of(head, target.shared(draft_ids), recipe), teacher)

    def batch(self, lesson: TokenBatch, step: int) -> tuple[Tensor, ...]:
        return lesson.tokens[:, :-1], lesson.positions, places_of(self.recipe, len(lesson.tokens), step)

    def trainer(self, run: Path) -> Trainer:
        named = self.trainee.named_parameters()
        matrices = [p for name, p in named if p.ndim == 2 and not any(part in name for part in OF_TOKENS)]

        def loss_of(tokens: Tensor, positions: Tensor, starts: Tensor) -> Learnt:
            return learn(self.teacher.judge(self.trainee, tokens, positions, starts))

        schedule = Schedule.of(self.recipe, self.recipe.tokens, self.recipe.learning_rate)
        return Trainer(self.trainee, matrices, schedule, run / self.recipe.kind, loss_of)


def places_of(recipe: HeadRecipe, rows: int, step: int) -> Tensor:
    """int64 [rows, starts], ascending: tokens below which chains are guessed. dspark draws its anchors by step."""
    everywhere = torch.arange(1, recipe.sequence_length - recipe.depth + 1)
    if recipe.kind != "dspark" or recipe.anchors >= len(everywhere):
        return everywhere.expand(rows, -1)
    generator = torch.Generator().manual_seed((recipe.seed << 24) + step)
    drawn = [torch.randperm(len(everywhere), generator=generator)[: recipe.anchors] for _ in range(rows)]
    return everywhere[torch.stack(drawn)].sort(1).values


def most_frequent(text: Tokens, count: int) -> Tensor:
    """int64 [count], ascending."""
    order = np.argsort(-np.bincount(text, minlength=count), kind="stable")
    return torch.from_numpy(np.sort(order[:count]))


def head_of(recipe: HeadRecipe, target: TaughtTarget) -> Head:
    config = target.config
    width, eps = config.hidden_size, getattr(config, "rms_norm_eps", 1e-6)
    if recipe.kind == "medusa":
        return MedusaHead(Projection((FINAL,), width, fc=False), width, recipe.depth, recipe.layers)
    decoder = Decoder(
        layers=recipe.layers,
        hidden=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        eps=eps,
        qk_norm=recipe.kind != "eagle3",  # as the libraries that load them have it
        context=config.max_position_embeddings,
    )
    if recipe.kind == "mtp":
        return RecurrentHead(Projection((FINAL,), width, fc=False, eps=eps), decoder, "joined", recycles_normed=True)
    layers = target.feature_layers(recipe.feature_layers)
    if recipe.kind == "eagle3":
        projection = Projection(layers, width, joined_norm=True, eps=eps)
        return RecurrentHead(projection, decoder, "wide", residual_normed=True, recycles_normed=True)
    return BlockHead(
        Projection(layers, width, feature_norm=True, eps=eps),
        decoder,
        block=recipe.depth,
        mask_token=target.config.vocab_size - 1,
        anchored=True,
        markov_rank=recipe.markov_rank,
        confidence="markov",
    )


def trainee_of(head: Head, shared: Shared, recipe: HeadRecipe) -> Trainee:
    trainee: Trainee
    if isinstance(head, RecurrentHead):
        trainee = RecurrentTrainee(head, shared, recipe.depth)
    elif isinstance(head, BlockHead):
        trainee = BlockTrainee(head, shared)
    else:
        assert isinstance(head, MedusaHead)
        trainee = ParallelTrainee(head, shared)
    start(trainee, recipe.layers, recipe.seed)
    return trainee.to(shared.embedding.device)


def trained_files(
    trainee: Trainee, head: Head, recipe: HeadRecipe, target: TaughtTarget, draft_ids: Tensor | None
) -> HeadFiles:
    shared = trainee.shared
    tensors = trainee.state_dict()
    if not isinstance(head, MedusaHead):
        tensors |= {"embed_tokens.weight": shared.embedding, "lm_head.weight": shared.output}
    spec = HeadSpec(head, recipe.kind, "pilotfish", shared.embedding.shape[1], target.layers, len(shared.output))
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    trained_on = TrainedOn(digest=TargetFacts.read(recipe.target).digest())
    return HeadFiles(spec, stored, None if draft_ids is None else draft_ids.cpu(), "", trained_on)


def write_head(files: HeadFiles, recipe: HeadRecipe, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    head = files.spec.head
    if isinstance(head, MedusaHead):
        _write_medusa(files, head, directory)
    else:
        export_head(files, directory, TargetFacts.read(recipe.target), tokens=recipe.depth, lean=recipe.lean)
    (directory / "model.safetensors").chmod(0o644)  # safetensors writes files for their owner alone


def _write_medusa(files: HeadFiles, head: MedusaHead, directory: Path) -> None:
    directory.mkdir(parents=True)
    tensors = {
        name.replace("heads.", "blocks.", 1).replace(".blocks.", ".layers.")
        if ".blocks." in name
        else f"lm_heads.{name.split('.')[1]}.weight": tensor
        for name, tensor in files.tensors.items()
    }
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.hidden,
        "num_heads": head.heads,
        "num_hidden_layers": head.blocks,
        "medusa_fc_bias": head.bias,
        "truncated_vocab_size": files.spec.draft_vocab,
        **files.trained_on.fields(),
    }
    if files.d2t is not None:
        tensors["token_map"] = files.d2t
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
