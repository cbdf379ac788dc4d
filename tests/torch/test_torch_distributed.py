"""Two processes on the CPU: DistributedDataParallel, FSDP2, distributed checkpoints."""

import traceback
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


class Two:
    """Two processes that talk to each other; they start with the first function and stay."""

    def __init__(self, folder):
        self.folder, self.started, self.held = folder, 0, None

    def __call__(self, function, *args):
        """Run a function of rank and args in both."""
        if self.held is None:
            self.held = self._start()
        _, inboxes, outbox = self.held
        for inbox in inboxes:
            inbox.put((function, args))
        try:
            for _ in range(RANKS):
                failed = outbox.get(timeout=100)
                assert failed is None, failed
        except BaseException:  # the other one may wait for ever
            self.stop()
            raise

    def stop(self):
        if self.held is not None:
            for process in self.held[0]:
                process.kill()
                process.join()
        self.held = None

    def _start(self):
        context = torch.multiprocessing.get_context("spawn")
        inboxes, outbox = [context.SimpleQueue() for _ in range(RANKS)], context.Queue()
        self.started += 1
        store = str(self.folder / f"store{self.started}")
        made = [
            context.Process(target=_joined, args=(rank, store, inboxes[rank], outbox), daemon=True)
            for rank in range(RANKS)
        ]
        for process in made:
            process.start()
        return made, inboxes, outbox


def _joined(rank, store, inbox, outbox):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    while True:
        function, args = inbox.get()
        try:
            function(rank, *args)
            dist.barrier()  # one that is done first waits for the other
            outbox.put(None)
        except BaseException:
            outbox.put(f"rank {rank}: {traceback.format_exc()}")


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    two = Two(tmp_path_factory.mktemp("two"))
    yield two
    two.stop()


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


def test_ddp_sends_codes_once_and_not_with_every_step(in_two):
    in_two(_ddp)


# ---- FSDP2 --------------------------------------------------------------------------------------

# Before, fully_shard makes each shard a parameter that requires a gradient, which bytes cannot.
FSDP2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch before 2.13"
)


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
def test_fsdp2_shards_and_gathers_bytes(in_two):
    in_two(_fsdp)


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
def test_fsdp2_in_mixed_precision_leaves_codes_alone(in_two):
    in_two(_mixed)


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
def test_checkpoints_come_back_sharded_and_whole(in_two, tmp_path):
    from torch.distributed import checkpoint

    in_two(_checkpoint, str(tmp_path / "saved"))
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
def test_a_whole_state_is_sent_to_all(in_two):
    in_two(_whole_to_shards)


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
def test_fsdp2_shards_experts_and_llm_int8(in_two):
    in_two(_others)


# ---- the processes themselves; last, since they end with it --------------------------------------


def _fail(rank):
    assert rank == 0, "the second one"
    dist.barrier()


def test_an_error_in_one_process_is_the_tests(in_two):
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*the second one"):
        in_two(_fail)
    assert in_two.held is None
