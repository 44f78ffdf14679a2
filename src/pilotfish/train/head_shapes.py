from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.spec import FINAL, Decoder, Head, Projection
from pilotfish.train.heads.block import BlockTrainee
from pilotfish.train.heads.parallel import ParallelTrainee
from pilotfish.train.heads.recurrent import RecurrentTrainee
from pilotfish.train.heads.trainee import Shared, Trainee, start
from pilotfish.train.recipes import HeadRecipe
from pilotfish.train.taught_target import TaughtTarget


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
