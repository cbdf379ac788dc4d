"""Two processes on the CPU: DistributedDataParallel, FSDP2, distributed checkpoints."""

import warnings

import pytest

import cuquant as cq

torch = pytest.importorskip("torch", reason="torch is optional")
fsdp = pytest.importorskip("torch.distributed.fsdp", reason="torch without distributed")

from torch_models import Block, components, random  # noqa: E402

import cuquant.torch  # noqa: E402
from cuquant.torch import quantize_  # noqa: E402

nn, dist = torch.nn, torch.distributed
RANKS = 2
FORMATS = ("nf4", "int8", "q4_0", "k3", "mxfp4")

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"
)


def model_of(fmt="int4", seed=0, **options):
    """The same in every process; its norm and one bias learn."""
    torch.manual_seed(seed)
    model = quantize_(Block(words=64), {"embed": fmt, "*": fmt}, **options)
    model.norm.requires_grad_()
    model.mlp["down"].bias.requires_grad_()
    return model


def learn(model, rank):
    """Gradients of one step of a process's own tokens, by name."""
    model.zero_grad()
    model(torch.arange(8) + 8 * rank).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def averaged(model):
    """What the gradients of all processes are together."""
    found = [{k: g.clone() for k, g in learn(model, rank).items()} for rank in range(RANKS)]
    return {key: sum(one[key] for one in found) / RANKS for key in found[0]}


def in_two(function, tmp_path, *args):
    """A function of rank and args, run in two processes that talk to each other."""
    torch.multiprocessing.spawn(_joined, (function, str(tmp_path / "store"), args), RANKS)


def _joined(rank, function, store, args):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    try:
        function(rank, *args)
        dist.barrier()  # one that leaves first takes the others' threads along
    finally:
        dist.destroy_process_group()


# ---- DistributedDataParallel --------------------------------------------------------------------


def _ddp(rank):
    for fmt in FORMATS:
        model = model_of(fmt)
        codes = [part.clone() for _, part in components(model)]
        if rank:  # the first process's are everyone's at the start
            with torch.no_grad():
                for _, part in components(model):
                    part.zero_()
        ddp = nn.parallel.DistributedDataParallel(model)
        assert all(torch.equal(a, b) for a, (_, b) in zip(codes, components(model), strict=True))
        for _ in range(3):  # the order of buckets is agreed on at the second step
            learn(ddp, rank)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            found = learn(ddp, rank)
        names = {event.key for event in seen.key_averages()}
        assert any("all_reduce" in name or "allreduce" in name for name in names), names
        assert not [name for name in names if "broadcast" in name]
        for name, gradient in averaged(model_of(fmt)).items():
            torch.testing.assert_close(found[f"module.{name}"], gradient, rtol=1e-4, atol=1e-6)


def test_ddp_sends_codes_once_and_not_with_every_step(tmp_path):
    in_two(_ddp, tmp_path)


# ---- FSDP2 --------------------------------------------------------------------------------------

FSDP2 = pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="torch before 2.6")


def sharded(model, **options):
    fully_shard = fsdp.fully_shard
    for layer in [*model.mlp.values(), model.embed]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _fsdp(rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.tensor import DTensor

    for fmt, prepack in [*((fmt, False) for fmt in FORMATS), ("int4", True)]:
        plain = model_of(fmt, prepack=prepack)
        state = {k: v.clone() for k, v in plain.state_dict().items()}
        wanted, gradients = plain(torch.arange(8)), averaged(plain)
        model = sharded(model_of(fmt, prepack=prepack))
        for name, part in components(model):
            assert isinstance(part, DTensor) and part.dtype == torch.uint8, name
            held = part.to_local().numel()
            assert held <= -(-part.shape[0] // RANKS) * (part.numel() // part.shape[0]), name
        for _ in range(3):  # memory is freed and gathered again
            found = learn(model, rank)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.full_tensor(), gradients[name])
        torch.testing.assert_close(model(torch.arange(8)), wanted)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=options)
        if rank == 0:
            assert whole.keys() == state.keys()
            assert all(torch.equal(whole[key], state[key]) for key in state)


@FSDP2
def test_fsdp2_shards_and_gathers_bytes(tmp_path):
    in_two(_fsdp, tmp_path)


def _mixed(rank):
    MixedPrecisionPolicy = fsdp.MixedPrecisionPolicy
    model = model_of()
    model.embed.bfloat16()  # what is looked up is of the table's dtype
    model = sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    y = model(torch.arange(8))
    with torch.no_grad():
        wanted = model_of().bfloat16()(torch.arange(8))
    torch.testing.assert_close(y.float(), wanted.float(), rtol=0.1, atol=0.1)
    learn(model, rank)


@FSDP2
def test_fsdp2_in_mixed_precision_leaves_codes_alone(tmp_path):
    in_two(_mixed, tmp_path)


# ---- distributed checkpoints --------------------------------------------------------------------


def _checkpoint(rank, path):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = sharded(model_of())
    checkpoint.save(get_model_state_dict(model), checkpoint_id=path)
    other = sharded(model_of(seed=1))
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=path)
    set_model_state_dict(other, state)
    for (name, a), (_, b) in zip(components(other), components(model), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    torch.testing.assert_close(other(torch.arange(8)), model(torch.arange(8)))


@FSDP2
def test_checkpoints_come_back_sharded_and_whole(tmp_path):
    from torch.distributed import checkpoint

    in_two(_checkpoint, tmp_path, str(tmp_path / "saved"))
    other = model_of(seed=1)
    state = other.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        checkpoint.load(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    other.load_state_dict(state)
    wanted = model_of().state_dict()
    assert all(torch.equal(part, wanted[key]) for key, part in other.state_dict().items())


def _whole_to_shards(rank):
    """A whole state of the first process goes to all."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state = model_of().state_dict() if rank == 0 else {}
    model = sharded(model_of(seed=1))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    torch.testing.assert_close(model(torch.arange(8)), model_of()(torch.arange(8)))


@FSDP2
def test_a_whole_state_is_sent_to_all(tmp_path):
    in_two(_whole_to_shards, tmp_path)


def test_memory_that_numpy_has_seen_can_be_resized():
    """As FSDP frees what it has gathered: `Tensor.numpy` would forbid it."""
    x = random(64, 64)
    cq.quantize(x, "int4")
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(64 * 64 * 4)
    assert torch.zeros_like(x).sum() == 0


class Experts(nn.Module):
    """Fused experts, [E, N, K]; an odd number of them is sharded unevenly."""

    def __init__(self):
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(random(3, 64, 64) / 8)
        self.gate_up_proj_bias = nn.Parameter(random(3, 64, seed=2))
        self.down_proj = nn.Parameter(random(3, 64, 32, seed=1) / 6)


def _others(rank):
    torch.manual_seed(0)  # the same in both
    x, index, weights = random(5, 64), torch.arange(5)[:, None] % 3, torch.ones(5, 1)
    made = [
        quantize_(nn.ModuleDict({"experts": Experts(), "head": nn.Linear(64, 64)}), how)
        for how in ({"experts": "int4", "head": "llm_int8"},) * 2
    ]
    for part, source in zip(made[1].parameters(), made[0].parameters(), strict=True):
        part.data.copy_(source)
    experts, head = (fsdp.fully_shard(made[1][name]) for name in ("experts", "head"))
    assert all(type(p) is not nn.Parameter for _, p in components(made[1]))
    for _ in range(2):
        assert torch.equal(experts(x, index, weights), made[0]["experts"](x, index, weights))
        assert torch.equal(head(x), made[0]["head"](x))
        experts.reshard()
        head.reshard()


@FSDP2
def test_fsdp2_shards_experts_and_llm_int8(tmp_path):
    in_two(_others, tmp_path)
