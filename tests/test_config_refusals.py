"""Settings and combinations of settings that are refused, and in which words."""

import math

import pytest

from megatron_merak.errors import ConfigError
from tests.config import PP, TP, make, refusal

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}


MIXTURE = {"num_experts": 4, "swiglu": True, "disable_bias_linear": True}
EXPERTS = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "expert_model_parallel_size": 2,
}
ON_HOST = {"offload_model_states": True}
REFUSED = [
    (
        {"parallel": ON_HOST | {"data_parallel_sharding_strategy": "optim"}},
        2,
        "--offload-model-states True: weights are copied as --data-parallel-sharding-strategy "
        "optim_grads_params gathers them, and it is optim. Use optim_grads_params, or leave the strategy out.",
    ),
    (
        {"parallel": ON_HOST | {"use_distributed_optimizer": True}},
        2,
        "--use-distributed-optimizer True: --offload-model-states shards weights and gradients, too. Leave it out.",
    ),
    (
        {"parallel": ON_HOST | {"num_distributed_optimizer_instances": 2}},
        4,
        "--offload-model-states True: the 2 instances of --num-distributed-optimizer-instances add up shards "
        "on their devices. Use one instance.",
    ),
    (
        {"parallel": ON_HOST, "train": {"bf16": True, "fp8_format": "hybrid"}},
        1,
        "--offload-model-states True: weights are rounded to fp8 where they stay on the device. Leave fp8 out.",
    ),
    (
        {"parallel": {"recompute_method": "block"}},
        1,
        "--recompute-method block: has no effect without --recompute-granularity full. "
        "Add --recompute-granularity full, or leave it out.",
    ),
    (
        {"parallel": FULL | {"recompute_method": "block"}},
        1,
        "--recompute-num-layers (missing): is needed with --recompute-method block. Give a number of layers.",
    ),
    (
        {"parallel": SELECTIVE | {"recompute_method": "uniform", "recompute_num_layers": 2}},
        1,
        "--recompute-method uniform: it chooses entire layers, and --recompute-granularity selective recomputes none. "
        "Use --recompute-granularity full, or --recompute-method capacity.",
    ),
    (
        {"parallel": FULL | {"recompute_num_layers": 2}},
        1,
        "--recompute-num-layers 2: has an effect only with --recompute-method uniform or block. Choose one of them, "
        "or leave it out.",
    ),
    (
        {"model": {"hidden_size": 65}},
        1,
        "--hidden-size 65: is not a multiple of --num-attention-heads 8. Use 64 or 72, or give --kv-channels.",
    ),
    (
        {"model": {"hidden_size": 5}},
        1,
        "--hidden-size 5: is not a multiple of --num-attention-heads 8. Use 8, or give --kv-channels.",
    ),
    (
        {"model": {"hidden_size": 16, "swiglu": True}},
        1,
        "--hidden-size 16: gives --swiglu an MLP of width 0. Give --ffn-hidden-size.",
    ),
    (
        {"model": {"num_query_groups": 2}},
        1,
        "--num-query-groups 2: has no effect without --group-query-attention. "
        "Add --group-query-attention, or leave --num-query-groups out.",
    ),
    (
        {"model": {"num_query_groups": 3, "group_query_attention": True}},
        1,
        "--num-query-groups 3: does not divide --num-attention-heads 8. Use 2 or 4.",
    ),
    (
        {"model": {"num_query_groups": 16, "group_query_attention": True}},
        1,
        "--num-query-groups 16: does not divide --num-attention-heads 8. Use 8.",
    ),
    (
        {"model": {"moe_aux_loss_coeff": 0.01}},
        1,
        "--moe-aux-loss-coeff 0.01: has no effect without --num-experts. Add --num-experts, or leave it out.",
    ),
    (
        {"model": MIXTURE | {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "none"}},
        1,
        "--moe-aux-loss-coeff 0.01: has no effect without --moe-router-load-balancing-type aux_loss. "
        "Add --moe-router-load-balancing-type aux_loss, or leave it out.",
    ),
    (
        {"model": {"num_experts": 4}},
        1,
        "--swiglu off: is needed with --num-experts: experts are gated. Add it.",
    ),
    (
        {"model": {"num_experts": 4, "swiglu": True}},
        1,
        "--disable-bias-linear off: is needed with --num-experts: experts have no biases. Add it.",
    ),
    (
        {"model": MIXTURE | {"moe_router_topk": 5}},
        1,
        "--moe-router-topk 5: is more than --num-experts 4. Use at most 4.",
    ),
    (
        {"model": MIXTURE | {"moe_router_topk": 1}},
        1,
        "--moe-router-topk 1: the weight of a token's one expert is 1, from which its router learns nothing. "
        "Add --moe-router-pre-softmax.",
    ),
    (
        {"model": MIXTURE | {"moe_shared_expert_gate": True}},
        1,
        "--moe-shared-expert-gate True: has no effect without --moe-shared-expert-intermediate-size. "
        "Add --moe-shared-expert-intermediate-size, or leave it out.",
    ),
    (
        {
            "model": MIXTURE | {"moe_shared_expert_intermediate_size": 5},
            "parallel": {"tensor_model_parallel_size": 2},
        },
        2,
        "--tensor-model-parallel-size 2: does not divide --moe-shared-expert-intermediate-size 5. Use 1.",
    ),
    (
        {"model": MIXTURE | {"moe_token_drop_policy": "position"}},
        1,
        "--moe-token-drop-policy position: has no effect without --moe-expert-capacity-factor. "
        "Add --moe-expert-capacity-factor, or leave it out.",
    ),
    (
        {
            "model": MIXTURE | {"moe_ffn_hidden_size": 5},
            "parallel": {"tensor_model_parallel_size": 2},
        },
        2,
        "--tensor-model-parallel-size 2: does not divide the expert width 5. Use 1.",
    ),
    (
        {"model": MIXTURE | {"moe_ffn_hidden_size": 20}, "train": {"bf16": True}},
        1,
        "--moe-ffn-hidden-size 20: is not a multiple of 8, which the products of experts in bf16 need. Use 16 or 24.",
    ),
    (
        {"parallel": EXPERTS},
        2,
        "--expert-model-parallel-size 2: the model has no experts. Add --num-experts, or leave it out.",
    ),
    (
        {"parallel": {"parallel": "auto", "moe_expert_rank_capacity_factor": 2.0}},
        2,
        "--moe-expert-rank-capacity-factor 2.0: has an effect on rows of experts, and the model has none. "
        "Leave it out, or add --num-experts and --expert-model-parallel-size.",
    ),
    (
        {"model": MIXTURE | {"num_experts": 3}, "parallel": EXPERTS},
        2,
        "--expert-model-parallel-size 2: does not divide --num-experts 3. Leave it out.",
    ),
    (
        {
            "model": MIXTURE | {"moe_ffn_hidden_size": 20},
            "parallel": {"expert_tensor_parallel_size": 3},
        },
        3,
        "--expert-tensor-parallel-size 3: does not divide the expert width 20. Leave it out.",
    ),
    (
        {"model": MIXTURE, "parallel": EXPERTS | {"expert_tensor_parallel_size": 2}},
        2,
        "--expert-model-parallel-size 2: experts, over 2 ranks each, are divided over the 2 "
        "tensor-parallel ranks of their layer. Use 1.",
    ),
    (
        {"model": {"max_position_embeddings": 16}},
        1,
        "--seq-length 32: exceeds --max-position-embeddings 16. Use at most 16, or raise --max-position-embeddings.",
    ),
    (
        {"model": {"rotary_base": 500000}},
        1,
        "--rotary-base 500000: has no effect without rotary embedding. "
        "Add --position-embedding-type rope, or leave it out.",
    ),
    (
        {"model": {"use_rope_scaling": True}},
        1,
        "--use-rope-scaling True: has no effect without rotary embedding. "
        "Add --position-embedding-type rope, or leave it out.",
    ),
    (
        {"model": {"position_embedding_type": "rope", "rope_scaling_factor": 4.0}},
        1,
        "--rope-scaling-factor 4.0: has no effect without scaling. Add --use-rope-scaling, or leave it out.",
    ),
    (
        {"model": {"position_embedding_type": "rope", "rotary_percent": 0.4}},
        1,
        "--rotary-percent 0.4: rotates 3 of a head's 8 channels, an odd number or none. "
        "Change it, --kv-channels or --num-attention-heads.",
    ),
    (
        {"parallel": {TP: 3}},
        3,
        "--tensor-model-parallel-size 3: does not divide --num-attention-heads 8. Use 1, or 2 or 4 "
        "on another number of ranks.",
    ),
    (
        {"parallel": {TP: 3, PP: 2}},
        4,
        "--tensor-model-parallel-size 3: does not divide --num-attention-heads 8. Use 2, or 4 on "
        "another number of ranks.",
    ),
    (
        {"parallel": {TP: 3}},
        4,
        "--tensor-model-parallel-size 3: does not divide --num-attention-heads 8. Use 2 or 4.",
    ),
    (
        {"parallel": {TP: 16}},
        16,
        "--tensor-model-parallel-size 16: does not divide --num-attention-heads 8. Use 8.",
    ),
    (
        {"model": {"ffn_hidden_size": 30}, "parallel": {TP: 4}},
        4,
        "--tensor-model-parallel-size 4: does not divide the MLP width 30. Use 2.",
    ),
    (
        {
            "model": {
                "num_attention_heads": 12,
                "kv_channels": 8,
                "num_query_groups": 6,
                "group_query_attention": True,
            },
            "parallel": {TP: 4},
        },
        4,
        "--tensor-model-parallel-size 4: does not divide --num-query-groups 6. Use 2.",
    ),
    (
        {"parallel": {PP: 7}},
        7,
        "--pipeline-model-parallel-size 7: is more stages than the 6 units "
        "(embedding, 4 layers, output head). Use 1, or 6 on another number of ranks.",
    ),
    (
        {"parallel": {TP: 2, PP: 2}},
        6,
        "the number of ranks 6: is not a multiple of --tensor-model-parallel-size 2 "
        "x --pipeline-model-parallel-size 2 = 4. Start 4 or 8 ranks, or change the degrees.",
    ),
    (
        {"parallel": {TP: 2}},
        1,
        "the number of ranks 1: is not a multiple of --tensor-model-parallel-size 2 "
        "x --pipeline-model-parallel-size 1 = 2. Start 2 ranks, or change the degrees.",
    ),
    (
        {"train": {"global_batch_size": 10}},
        2,
        "--global-batch-size 10: is not a multiple of --micro-batch-size 2 x data-parallel size 2 = 4. Use 8 or 12.",
    ),
    (
        {"train": {"global_batch_size": 2}},
        2,
        "--global-batch-size 2: is not a multiple of --micro-batch-size 2 x data-parallel size 2 = 4. Use 4.",
    ),
    (
        {"train": {"train_iters": None}},
        1,
        "--train-iters (missing): is needed to train. Give it, --train-samples or --skip-train.",
    ),
    (
        {"optimizer": {"lr": None}},
        1,
        "--lr (missing): is needed to train. Give the peak learning rate, or --skip-train.",
    ),
    ({"optimizer": {"min_lr": 0.01}}, 1, "--min-lr 0.01: exceeds --lr 0.001. Use at most 0.001."),
    (
        {"optimizer": {"lr_warmup_init": 0.01}},
        1,
        "--lr-warmup-init 0.01: exceeds --lr 0.001. Use at most 0.001.",
    ),
    (
        {"optimizer": {"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}},
        1,
        "--lr-warmup-fraction 0.1: contradicts --lr-warmup-iters. Give only one of them.",
    ),
    (
        {"optimizer": {"lr_warmup_iters": 10}},
        1,
        "--lr-warmup-iters 10: leaves nothing of the 10 decay iterations. Use at most 9, or raise --lr-decay-iters.",
    ),
    (
        {"optimizer": {"lr_wsd_decay_iters": 5}},
        1,
        "--lr-wsd-decay-iters 5: has no effect without "
        "--lr-decay-style WSD. Add --lr-decay-style WSD, or leave it out.",
    ),
    (
        {"optimizer": {"lr_decay_style": "WSD"}},
        1,
        "--lr-wsd-decay-iters (missing): is needed with --lr-decay-style WSD. Give the length of the final decay.",
    ),
    (
        {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11}},
        1,
        "--lr-wsd-decay-iters 11: exceeds the 10 decay iterations. Use at most 10.",
    ),
    (
        {"optimizer": {"end_weight_decay": 0.2}},
        1,
        "--end-weight-decay 0.2: has no effect while "
        "--weight-decay-incr-style is constant. Use --weight-decay-incr-style linear or cosine, or leave it out.",
    ),
    (
        {"optimizer": {"weight_decay_incr_style": "linear"}},
        1,
        "--start-weight-decay (missing): is needed with --weight-decay-incr-style linear. Give it.",
    ),
    (
        {
            "optimizer": {
                "weight_decay_incr_style": "cosine",
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
            }
        },
        1,
        "--end-weight-decay 0.1: is below --start-weight-decay 0.2. Use at least 0.2.",
    ),
    (
        {"logging": {"straggler_minmax_count": 2}},
        1,
        "--straggler-minmax-count 2: has no effect without --log-straggler. Add --log-straggler, or leave it out.",
    ),
    (
        {"data": {"mock_data": False}},
        1,
        "--data-path (missing): there is no data to train on. Give --data-path, "
        "--train-data-path, --stream-path or --mock-data.",
    ),
    (
        {"data": {"data_path": ("a",)}},
        1,
        "--data-path (given): contradicts --mock-data. Give only one source of data.",
    ),
    (
        {"data": {"mock_data": False, "data_path": ("a",), "test_data_path": ("b",)}},
        1,
        "--data-path (given): contradicts --test-data-path. Give only one source of data.",
    ),
    (
        {"data": {"mock_data": False, "data_args_path": "f", "test_data_path": ("b",)}},
        1,
        "--data-args-path (given): contradicts --test-data-path. Give only one source of data.",
    ),
    (
        {"data": {"mock_data": False, "per_split_data_args_path": "f", "split": "1"}},
        1,
        "--split '1': has no effect on data given part by part. Leave it out, or use --data-path.",
    ),
    (
        {"data": {"mock_data": False, "train_data_path": ("a",), "split": "1"}},
        1,
        "--split '1': has no effect on data given part by part. Leave it out, or use --data-path.",
    ),
    (
        {"data": {"split": "1, x"}},
        1,
        "--split '1, x': is not a list of one to three weights separated by commas. Write it like '969, 30, 1'.",
    ),
    (
        {"data": {"split": "0,0"}},
        1,
        "--split '0,0': gives every part weight 0. Write it like '969, 30, 1'.",
    ),
    (
        {"data": {"tokenizer_type": "HuggingFaceTokenizer"}},
        1,
        "--tokenizer-model (missing): is needed with "
        "--tokenizer-type HuggingFaceTokenizer. Give the tokenizer's directory or tokenizer.json.",
    ),
    (
        {"data": {"tokenizer_model": "t"}},
        1,
        "--tokenizer-model t: is read only with --tokenizer-type HuggingFaceTokenizer, "
        "SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer or TikTokenizer. "
        "Give one of these types, or leave it out.",
    ),
    (
        {
            "data": {
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": "t",
                "vocab_file": "v",
            }
        },
        1,
        "--vocab-file v: is read only with --tokenizer-type GPT2BPETokenizer. "
        "Give this type, or leave it out.",
    ),
    (
        {"data": {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}},
        1,
        "--merge-file (missing): is needed with --tokenizer-type GPT2BPETokenizer. "
        "Give the merges.txt of the vocabulary.",
    ),
    (
        {"data": {"tokenizer_type": "Llama2Tokenizer"}},
        1,
        "--tokenizer-model (missing): is needed with --tokenizer-type Llama2Tokenizer. "
        "Give the .model file of sentencepiece.",
    ),
    (
        {"model": {"vocab_size": None}, "data": {"tokenizer_type": "NullTokenizer"}},
        1,
        "--vocab-size (missing): is needed with --tokenizer-type NullTokenizer. "
        "Give the number of token ids in the data.",
    ),
    (
        {"data": {"mock_data": False, "data_path": ("a",)}},
        1,
        "--tokenizer-type (missing): is needed to know the "
        "vocabulary. Use HuggingFaceTokenizer with --tokenizer-model, or NullTokenizer.",
    ),
    (
        {"model": {"seq_length": 30}, "parallel": {TP: 4, "sequence_parallel": True}},
        4,
        "--seq-length 30: is not a multiple of --tensor-model-parallel-size 4, and --sequence-parallel divides it. "
        "Use 28 or 32, or leave --sequence-parallel out.",
    ),
    (
        {
            "model": {"seq_length": 30, "max_position_embeddings": 31},
            "parallel": {TP: 4, "sequence_parallel": True},
        },
        4,
        "--seq-length 30: is not a multiple of --tensor-model-parallel-size 4, and --sequence-parallel divides it. "
        "Use 28, or leave --sequence-parallel out.",
    ),
    (
        {
            "model": {"seq_length": 3, "max_position_embeddings": 3},
            "parallel": {TP: 4, "sequence_parallel": True},
        },
        4,
        "--seq-length 3: is not a multiple of --tensor-model-parallel-size 4, and --sequence-parallel divides it. "
        "Leave --sequence-parallel out.",
    ),
    (
        {"parallel": {"distributed_backend": "emu", "emulate": "laptop", "preflight": True}},
        1,
        "--preflight True: links of an emulated cluster are modelled, and there is nothing to measure. Leave it out.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp-xp"}},
        1,
        "--rank-order tp-dp-xp: there is no axis xp. Join tp, dp and pp by dashes, the innermost first, like tp-dp-pp "
        "or tp-pp-dp.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp"}},
        1,
        "--rank-order tp-dp: pp is missing. Join tp, dp and pp by dashes, the innermost first, like tp-dp-pp or "
        "tp-pp-dp.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp-pp-dp"}},
        1,
        "--rank-order tp-dp-pp-dp: dp is named twice. Join tp, dp and pp by dashes, the innermost first, like tp-dp-pp "
        "or tp-pp-dp.",
    ),
    (
        {"parallel": {"rank_order": "tp-dp-pp", "use_tp_pp_dp_mapping": True}},
        1,
        "--rank-order tp-dp-pp: contradicts --use-tp-pp-dp-mapping, which is tp-cp-pp-dp. Give only one of them.",
    ),
    (
        {"checkpoint": {"save_interval": 5}},
        1,
        "--save-interval 5: has no effect without --save. Give --save DIRECTORY, or leave it out.",
    ),
    (
        {
            "checkpoint": {"save": "c", "async_save": True},
            "parallel": {"distributed_backend": "mpi"},
        },
        1,
        "--async-save True: its thread needs a group of its own, and --distributed-backend mpi has one of all ranks. "
        "Leave it out, or use gloo.",
    ),
    (
        {"checkpoint": {"save_increment_interval": 5}},
        1,
        "--save-increment-interval 5: has no effect without --save. Give --save DIRECTORY, or leave it out.",
    ),
    (
        {"checkpoint": {"save": "c", "save_increment_interval": 5}},
        1,
        "--save-increment-interval 5: increments take space until the next checkpoint, and without --save-interval "
        "there is none. Give --save-interval.",
    ),
    (
        {"checkpoint": {"save": "c", "save_interval": 5, "save_increment_interval": 5}},
        1,
        "--save-increment-interval 5: is not less than --save-interval 5: each checkpoint comes first. Give a smaller "
        "one, such as a tenth.",
    ),
    (
        {
            "checkpoint": {
                "save": "c",
                "save_interval": 20,
                "save_increment_interval": 5,
                "no_save_optim": True,
            },
        },
        1,
        "--save-increment-interval 5: steps are repeated on the optimizer's state, which --no-save-optim leaves out. "
        "Give one of them.",
    ),
    (
        {
            "checkpoint": {"save": "c", "save_interval": 20, "save_increment_interval": 5},
            "parallel": {"distributed_backend": "mpi"},
        },
        1,
        "--save-increment-interval 5: its thread needs a group of its own, and --distributed-backend mpi has one of "
        "all ranks. Leave it out, or use gloo.",
    ),
    (
        {"checkpoint": {"ckpt_step": 0}},
        1,
        "--ckpt-step 0: has no effect without --load. Give --load DIRECTORY, or leave it out.",
    ),
    (
        {"checkpoint": {"save": "c", "save_interval": 5, "save_retain_interval": 12}},
        1,
        "--save-retain-interval 12: is not a multiple of --save-interval 5. Use 10 or 15.",
    ),
    (
        {"checkpoint": {"save": "c", "save_retain_interval": 12}},
        1,
        "--save-retain-interval 12: is not a multiple of --save-interval None. Give --save-interval.",
    ),
]


@pytest.mark.parametrize(
    "sections, world_size, message", REFUSED, ids=[row[2].split(".")[0] for row in REFUSED]
)
def test_refused_combinations(sections, world_size, message):
    assert refusal(sections, world_size) == message


@pytest.mark.parametrize(
    "sections, message",
    [
        (
            {"model": {"num_layers": 0}},
            "--num-layers 0: is out of range. Use a value at least 1 and at most 65536.",
        ),
        ({"checkpoint": {"save": ""}}, "--save '': is empty. Give a value, or leave the flag out."),
        (
            {"data": {"data_path": ["", "x"]}},
            "--data-path ('', 'x'): is empty. Give a value, or leave the flag out.",
        ),
        (
            {"model": {"num_layers": 2.0}},
            "--num-layers 2.0: is not a whole number. Give a whole number.",
        ),
        (
            {"model": {"num_layers": True}},
            "--num-layers True: is not a whole number. Give a whole number.",
        ),
        (
            {"model": {"num_layers": None}},
            "--num-layers None: is not a whole number. Give a whole number.",
        ),
        (
            {"model": {"hidden_dropout": 1}},
            "--hidden-dropout 1.0: is out of range. Use a value at least 0 and below 1.",
        ),
        ({"model": {"swiglu": 1}}, "--swiglu 1: is not true or false. Give true or false."),
        (
            {"model": {"normalization": "BatchNorm"}},
            "--normalization BatchNorm: is not one of the choices. Use LayerNorm or RMSNorm.",
        ),
        (
            {"model": {"position_embedding_type": "yarn"}},
            "--position-embedding-type yarn: is a choice of Megatron-LM that "
            "megatron_merak does not have yet. Use learned_absolute or rope or none.",
        ),
        (
            {"parallel": {"cp_comm_type": "ring"}},
            "--cp-comm-type ring: is not one of the choices. Use a2a or a2a+p2p or all_gather or p2p, or "
            "leave the flag out.",
        ),
        (
            {"parallel": {"recompute_granularity": "partial"}},
            "--recompute-granularity partial: is not one of the choices. Use full or selective, or leave the flag out.",
        ),
        (
            {"optimizer": {"lr": math.nan}},
            "--lr nan: is not a finite number. Give a finite number.",
        ),
        ({"optimizer": {"lr": 0}}, "--lr 0.0: is out of range. Use a value above 0."),
        ({"optimizer": {"lr": "1e-3"}}, "--lr '1e-3': is not a number. Give a number."),
        ({"optimizer": {"lr": 10**400}}, f"--lr {10**400}: is not a number. Give a number."),
        (
            {"train": {"seed": 2**32}},
            "--seed 4294967296: is out of range. Use a value at least 0 and at most 4294967295.",
        ),
        (
            {"data": {"data_path": "a"}},
            "--data-path 'a': is not a list of texts. Give a list of texts.",
        ),
        (
            {"data": {"data_path": [1, "a"]}},
            "--data-path (1, 'a'): is not a list of texts. Give a list of texts.",
        ),
    ],
)
def test_refused_values(sections, message):
    with pytest.raises(ConfigError) as caught:
        make(**sections)
    assert str(caught.value) == message
