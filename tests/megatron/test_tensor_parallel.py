"""tensor_parallel beside megatron-core's on two ranks: integers, so that sums are exact."""

import inspect

import pytest
import torch
import torch.distributed as dist

from megatron_merak.errors import ConfigError, DataError
from megatron_merak.megatron import ModelParallelConfig, parallel_state, tensor_parallel
from tests.megatron.peers import initialised, on_cpu
from tests.ranks import run_ranks

SEQUENCE = 4
BATCH = 3
FEATURES = 8
OUT = 12
WORDS = 16


def integers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def both(rank, check, *arguments):
    """Run a check with the modules of megatron-core and of the package."""
    from megatron.core import tensor_parallel as theirs

    with on_cpu():
        expected = check(theirs, rank, *arguments)
    found = check(tensor_parallel, rank, *arguments)
    assert len(found) == len(expected) > 0
    for mine, other in zip(found, expected, strict=True):
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == other.dtype and mine.shape == other.shape
            assert torch.equal(mine, other), (mine, other)
        else:
            assert mine == other
    return len(found)


def differentiated(function, x, seed=1):
    """The output and the gradient of x, for integers as the output's gradient."""
    x = x.clone().requires_grad_()
    out = function(x)
    out.backward(integers(*out.shape, seed=seed))
    return [out.detach(), x.grad]


def mappings(module, rank):
    whole = integers(SEQUENCE, BATCH, FEATURES)
    own = integers(SEQUENCE, BATCH, FEATURES, seed=10 + rank)
    group = dist.group.WORLD
    found = []
    for function, x in (
        (module.copy_to_tensor_model_parallel_region, whole),
        (module.reduce_from_tensor_model_parallel_region, own),
        (module.scatter_to_tensor_model_parallel_region, whole),
        (module.gather_from_tensor_model_parallel_region, own),
        (module.scatter_to_sequence_parallel_region, whole),
        (module.gather_from_sequence_parallel_region, own),
        (lambda x: module.gather_from_sequence_parallel_region(x, False), own),
        (module.reduce_scatter_to_sequence_parallel_region, own),
        (module.all_gather_last_dim_from_tensor_parallel_region, own),
        (module.reduce_scatter_last_dim_to_tensor_parallel_region, own),
        (lambda x: module.all_to_all(group, x), own),
        (lambda x: module.all_to_all(group, x, [1 + rank, 1 + rank], [1, 2]), own[:3]),
        (module.all_to_all_sp2hp, own),
        (module.all_to_all_hp2sp, own),
    ):
        found += differentiated(function, x)
    return found


def uneven(rank, size):
    """Parts of other sizes, which gloo does not take from megatron-core: beside the whole."""
    parallel_state.initialize_model_parallel(size)

    sizes = [1, 2]
    parts = [integers(each, FEATURES, seed=each) for each in sizes]
    grad = [integers(3, FEATURES, seed=30 + r) for r in range(size)]
    x = parts[rank].clone().requires_grad_()
    out = tensor_parallel.gather_from_sequence_parallel_region(x, output_split_sizes=sizes)
    assert torch.equal(out.detach(), torch.cat(parts))
    out.backward(grad[rank])
    assert torch.equal(x.grad, sum(grad).split(sizes)[rank])
    y = grad[rank].clone().requires_grad_()
    out = tensor_parallel.reduce_scatter_to_sequence_parallel_region(y, input_split_sizes=sizes)
    assert torch.equal(out.detach(), sum(grad).split(sizes)[rank])
    out.backward(parts[rank])
    assert torch.equal(y.grad, torch.cat(parts))


def config_of(**fields):
    return ModelParallelConfig(use_cpu_initialization=True, **fields)


def peers_config(module, **fields):
    """The configuration class that belongs to a module."""
    if module.__name__.startswith("megatron_merak"):
        return config_of(**fields)
    from megatron.core import ModelParallelConfig as Theirs

    config = Theirs(use_cpu_initialization=True, **fields)
    config._cpu_offloading_context = None
    return config


def whole_numbers(weight):
    torch.manual_seed(7)
    weight.copy_(torch.randint(-4, 5, weight.shape).float())


def trained(layer, x, seed=1):
    """Outputs, bias, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    out, bias = layer(x)
    out.backward(integers(*out.shape, seed=seed))
    grads = [parameter.grad for _, parameter in sorted(layer.named_parameters())]
    extra = [] if bias is None else [bias.detach().clone()]
    noted = [
        [
            getattr(parameter, name, None)
            for name in ("partition_dim", "partition_stride", "allreduce")
        ]
        for _, parameter in sorted(layer.named_parameters())
    ]
    kept = [grad for grad in grads if grad is not None]
    return [out.detach(), *extra, x.grad, *kept, layer.weight.detach().clone(), *noted]


def columns(module, rank, sequence, options):
    config = peers_config(module, tensor_model_parallel_size=2, sequence_parallel=sequence)
    layer = module.ColumnParallelLinear(
        FEATURES, OUT, config=config, init_method=whole_numbers, **options
    )
    x = integers(SEQUENCE, BATCH, FEATURES, seed=rank if sequence else 0)
    return trained(layer, x)


def rows(module, rank, sequence, options):
    config = peers_config(module, tensor_model_parallel_size=2, sequence_parallel=sequence)
    settings = {"bias": True, "input_is_parallel": True, "skip_bias_add": False} | options
    layer = module.RowParallelLinear(
        FEATURES, OUT, config=config, init_method=whole_numbers, **settings
    )
    width = FEATURES // 2 if settings["input_is_parallel"] else FEATURES
    return trained(layer, integers(SEQUENCE, BATCH, width, seed=rank if width < FEATURES else 0))


def frozen(module, rank):
    config = peers_config(module, tensor_model_parallel_size=2)
    layer = module.ColumnParallelLinear(FEATURES, OUT, config=config, init_method=whole_numbers)
    layer.weight.requires_grad_(False)
    return trained(layer, integers(SEQUENCE, BATCH, FEATURES))


def shared_weight(module, rank):
    config = peers_config(module, tensor_model_parallel_size=2)
    layer = module.ColumnParallelLinear(
        FEATURES,
        OUT,
        config=config,
        init_method=whole_numbers,
        bias=False,
        skip_weight_param_allocation=True,
    )
    weight = integers(OUT // 2, FEATURES, seed=rank).requires_grad_()
    x = integers(SEQUENCE, BATCH, FEATURES).requires_grad_()
    out, _ = layer(x, weight=weight, runtime_gather_output=True)
    out.backward(integers(*out.shape))
    return [out.detach(), x.grad, weight.grad]


def embeddings(module, rank, sequence):
    config = peers_config(module, tensor_model_parallel_size=2, sequence_parallel=sequence)
    layer = module.VocabParallelEmbedding(
        WORDS,
        FEATURES,
        init_method=whole_numbers,
        config=config,
        reduce_scatter_embeddings=sequence,
    )
    ids = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) * 5 % WORDS
    out = layer(ids)
    out.backward(integers(*out.shape))
    return [out.detach(), layer.weight.grad, layer.weight.detach()]


def losses(module, rank):
    logits = integers(SEQUENCE, BATCH, WORDS // 2, seed=rank).requires_grad_()
    target = torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH) % WORDS
    loss = module.vocab_parallel_cross_entropy(logits.clone(), target)
    loss.sum().backward()
    return [loss.detach(), logits.grad]


def compare_losses(rank):
    """The same exponentials are added in another order."""
    from megatron.core import tensor_parallel as theirs

    expected = losses(theirs, rank)
    torch.testing.assert_close(losses(tensor_parallel, rank), expected, rtol=1e-6, atol=1e-7)


def compare_smoothed():
    from megatron.core import tensor_parallel as theirs

    logits = integers(SEQUENCE, BATCH, WORDS)
    target = torch.arange(SEQUENCE * BATCH).view(SEQUENCE, BATCH) % WORDS
    expected = theirs.vocab_parallel_cross_entropy(logits.clone(), target, 0.1)
    found = tensor_parallel.vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def pieces(module, rank):
    x = integers(SEQUENCE, FEATURES)
    part = module.split_tensor_into_1d_equal_chunks(x, new_buffer=True)
    halves = module.split_tensor_along_last_dim(x, 2, contiguous_split_chunks=True)
    data = {"text": torch.arange(6).view(2, 3) + rank, "one": torch.full((1,), rank)}
    sent = module.broadcast_data(["text", "one"], data if rank == 0 else None, torch.int64)
    return [
        part,
        module.split_tensor_into_1d_equal_chunks(x),
        module.gather_split_1d_tensor(part),
        *halves,
        sent["text"],
        sent["one"],
    ]


def noted(module, rank):
    found = []
    x, y = torch.zeros(2), torch.zeros(2)
    module.set_tensor_model_parallel_attributes(x, True, 1, 2)
    module.copy_tensor_model_parallel_attributes(y, x)
    found += [y.tensor_model_parallel, y.partition_dim, y.partition_stride]
    z = torch.zeros(2)
    module.set_defaults_if_not_set_tensor_model_parallel_attributes(z)
    found += [z.tensor_model_parallel, z.partition_dim, z.partition_stride, z.is_qkv, z.expert_tp]
    for each in (x, z):
        found.append(bool(module.param_is_not_tensor_parallel_duplicate(each)))
    found.append(bool(module.param_is_not_tensor_parallel_duplicate(z, dist.group.WORLD)))
    return found


def drawn(module, rank):
    """Numbers of all streams, forks in each other among them."""
    module.model_parallel_cuda_manual_seed(11)
    tracker = module.get_cuda_rng_tracker()
    found = [torch.rand(3)]
    with tracker.fork():
        found.append(torch.rand(3))
        with tracker.fork(module.get_expert_parallel_rng_tracker_name()):
            found.append(torch.rand(3))
            with tracker.fork():
                found.append(torch.rand(3))
        found.append(torch.rand(3))
    found.append(torch.rand(3))
    with tracker.fork(module.random.get_data_parallel_rng_tracker_name()):
        found.append(torch.rand(3))
    states = tracker.get_states()
    found += [sorted(states), tracker.is_initialized()]
    tracker.set_states(states)
    state = torch.get_rng_state()
    found += [
        module.is_graph_safe_cuda_rng_tracker(tracker),
        torch.equal(module.convert_cuda_rng_state(state), state),
        module.get_expert_parallel_rng_tracker_name(),
    ]
    return found


def noisy(x, y):
    """Two products of dropped inputs, one of them in a tensor-parallel region."""
    dropped = torch.nn.functional.dropout(x, 0.5)
    return dropped * y, (dropped + y) * 2


def recomputed(module, rank, distributed):
    module.model_parallel_cuda_manual_seed(5)
    tracker = module.get_cuda_rng_tracker()
    runs = []

    def function(x, y):
        runs.append(torch.is_grad_enabled())
        with tracker.fork():
            return noisy(x, y)

    x = integers(SEQUENCE, BATCH, FEATURES).requires_grad_()
    y = integers(SEQUENCE, BATCH, FEATURES, seed=3).requires_grad_()
    first, second = module.checkpoint(function, distributed, x.clone(), y)
    (first.sum() + 3 * second.sum()).backward()
    return [first.detach(), second.detach(), x.grad, y.grad, runs, torch.rand(2)]


def without_output(module, rank):
    fp8 = {} if module.__name__.startswith("megatron_merak") else {"fp8": None}
    saved = module.CheckpointWithoutOutput(**fp8)
    module.model_parallel_cuda_manual_seed(5)
    x = integers(SEQUENCE, FEATURES).requires_grad_()
    weight = integers(FEATURES, FEATURES, seed=2).requires_grad_()
    runs = []

    def function(x):
        runs.append(torch.is_grad_enabled())
        return torch.nn.functional.dropout(x, 0.5) * 3

    y = saved.checkpoint(function, x)
    kept = y.detach().clone()
    z = y @ weight
    saved.discard_output_and_register_recompute(z)
    assert y.untyped_storage().size() == 0
    z.sum().backward()
    return [kept, z.detach(), x.grad, weight.grad, runs, torch.rand(2)]


CHECKS = [
    (mappings,),
    (columns, False, {}),
    (columns, False, {"bias": False, "gather_output": True, "stride": 2}),
    (columns, False, {"skip_bias_add": True, "disable_grad_reduce": True}),
    (columns, False, {"is_expert": True, "skip_bias_add": True}),
    (rows, False, {}),
    (rows, False, {"input_is_parallel": False, "stride": 2}),
    (rows, False, {"skip_bias_add": True, "is_expert": True}),
    (frozen,),
    (shared_weight,),
    (embeddings, False),
    (embeddings, True),
    (pieces,),
    (noted,),
    (drawn,),
    (recomputed, False),
    (recomputed, True),
    (without_output,),
    (columns, True, {}),
    (rows, True, {}),
]


def all_checks(rank, size):
    theirs, ours = initialised(tensor_model_parallel_size=size)
    check_names()
    counts = []
    for check, *arguments in CHECKS:
        try:
            counts.append(both(rank, check, *arguments))
        except Exception as error:
            error.add_note(f"in {check.__name__} {arguments}")
            raise
    compare_losses(rank)
    theirs.destroy_model_parallel()
    ours.destroy_model_parallel()
    initialised()
    compare_smoothed()
    return counts


def check_names():
    """Every public name is here, with every argument."""
    import megatron.core.tensor_parallel as theirs

    assert len(theirs.__all__) == 27
    assert {*theirs.__all__} <= {*tensor_parallel.__all__}
    for name in theirs.__all__:
        mine, other = getattr(tensor_parallel, name), getattr(theirs, name)
        if inspect.isclass(other):
            mine, other = mine.__init__, other.__init__
        missing = {*inspect.signature(other).parameters} - {*inspect.signature(mine).parameters}
        assert not missing, (name, missing)


def test_functions_and_layers_equal_megatron_cores():
    assert min(run_ranks(all_checks, 2)[0]) >= 3


def test_unequal_parts():
    run_ranks(uneven, 2)


def fused(_rank, size):
    parallel_state.initialize_model_parallel(size)
    found = []
    for fuses in (False, True):
        config = config_of(tensor_model_parallel_size=2, gradient_accumulation_fusion=fuses)
        layer = tensor_parallel.ColumnParallelLinear(
            FEATURES, OUT, config=config, init_method=whole_numbers
        )
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        for seed in (1, 2):
            out, _ = layer(integers(SEQUENCE, BATCH, FEATURES, seed=seed))
            out.sum().backward()
        found.append(layer.weight.main_grad if fuses else layer.weight.grad)
        assert (layer.weight.grad is None) == fuses
    assert torch.equal(*found)


def test_gradients_are_added_to_main_grad():
    run_ranks(fused, 2)


def deferred(_rank, size):
    """megatron-core defers with apex's kernel only: beside gradients that are not deferred."""
    parallel_state.initialize_model_parallel(size)
    config = config_of(tensor_model_parallel_size=2)
    config.defer_embedding_wgrad_compute = True
    config.wgrad_deferral_limit = 1
    inputs, grads = [], []
    layer = tensor_parallel.ColumnParallelLinear(
        FEATURES,
        OUT,
        config=config,
        init_method=whole_numbers,
        bias=False,
        embedding_activation_buffer=inputs,
        grad_output_buffer=grads,
    )
    x = [integers(SEQUENCE * BATCH, FEATURES, seed=seed) for seed in (3, 4)]
    for each in x:
        out, _ = layer(each)
        out.backward(integers(*out.shape, seed=5))
    assert len(inputs) == len(grads) == 1
    assert torch.equal(inputs[0], x[0])
    late = grads[0].t() @ inputs[0]
    expected = integers(SEQUENCE * BATCH, OUT // 2, seed=5).t()
    assert torch.equal(late, expected @ x[0])
    assert torch.equal(layer.weight.grad, expected @ x[1])


def test_weight_gradients_are_deferred():
    run_ranks(deferred, 2)


def mistakes(_rank, size):
    parallel_state.initialize_model_parallel(size)
    told = []
    config = config_of()
    whole = torch.ones(4, 4)
    for function, error in (
        (lambda: tensor_parallel.get_cuda_rng_tracker().fork("x").__enter__(), ConfigError),
        (
            lambda: tensor_parallel.scatter_to_tensor_model_parallel_region(whole[0, :3]),
            ConfigError,
        ),
        (lambda: tensor_parallel.scatter_to_sequence_parallel_region(whole[:3]), ConfigError),
        (lambda: tensor_parallel.CheckpointWithoutOutput(fp8="e4m3"), ConfigError),
        (
            lambda: tensor_parallel.ColumnParallelLinear(
                4, 3, config=config, init_method=whole_numbers
            ),
            ConfigError,
        ),
        (lambda: ModelParallelConfig(sequence_parallel=True), ConfigError),
    ):
        with pytest.raises(error) as raised:
            function()
        told.append(str(raised.value))
    for data in ({}, {"a": torch.ones(1)}, {"a": torch.ones([1] * 9, dtype=torch.int64)}):
        given = data if dist.get_rank() == 0 else None
        with pytest.raises(DataError) as raised:
            tensor_parallel.broadcast_data(["a"], given, torch.int64)
        told.append(str(raised.value))
    return told


def test_mistakes_name_what_is_wrong():
    first, second = run_ranks(mistakes, 2)
    assert (
        first
        == second
        == [
            "random stream x: it does not exist. Call model_parallel_cuda_manual_seed, or add it.",
            "last dimension 3: it does not divide by 2 ranks. Use a multiple of 2.",
            "first dimension 3: it does not divide by 2 ranks. Use a multiple of 2.",
            "fp8 e4m3: there is no fp8 here. Leave it out.",
            "output_size 3: it does not divide by 2 ranks. Use a multiple of 2.",
            "sequence_parallel True: tensor_model_parallel_size is 1. Leave it out, or use more "
            "tensor-parallel ranks.",
            "broadcast_data a: the data has no such key. Give it on the first rank.",
            "broadcast_data a: it has another type than torch.int64. Convert it, or broadcast it on its "
            "own.",
            "broadcast_data a: it has more than 8 dimensions. Flatten some of them.",
        ]
    )
