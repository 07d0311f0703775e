"""What the heuristics cannot know: fields of a tiny configuration, by model type (of a
sub-configuration too).
"""

CONFIGS = {
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "rwkv": dict(attention_hidden_size=64),
    "mamba2": dict(num_heads=8, n_groups=2),
    "esm": dict(mask_token_id=3, pad_token_id=1, vocab_size=256),
    "longcat_flash": dict(head_dim=8),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(hidden_size=64, ffn_hidden_size=128, moe_num_experts=4, moe_top_k=2),
    ),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "zamba": dict(layers_block_type=["linear_attention", "hybrid", "hybrid"], num_hidden_layers=3),
    "cohere_compass_text": dict(
        layer_types=["full_attention", "full_attention"],
        rope_parameters={"full_attention": dict(rope_type="default", rope_theta=10000.0)},
    ),
    "perceiver": dict(
        d_latents=64,
        max_position_embeddings=32,
        num_latents=16,
        num_self_attends_per_block=1,
        num_blocks=1,
        d_model=64,
    ),
    "swin": dict(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, patch_size=2),
    "swinv2": dict(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, patch_size=2),
    "donut-swin": dict(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, patch_size=2),
    "focalnet": dict(embed_dim=16, depths=[1, 1, 1, 1], patch_size=2),
    "pvt": dict(
        num_encoder_blocks=4,
        image_size=64,
        patch_sizes=[4, 2, 2, 2],
        num_attention_heads=[1, 2, 4, 4],
        hidden_sizes=[16, 32, 64, 64],
    ),
    "efficientnet": dict(width_coefficient=0.1, depth_coefficient=0.1, hidden_dim=128),
    "bit": dict(num_groups=4),
    "cvt": dict(embed_dim=[16, 32, 32], num_heads=[1, 2, 2], depth=[1, 2, 3]),
    "mobilevitv2": dict(image_size=64),
    "mobilenet_v2": dict(image_size=128),
    "textnet": dict(hidden_sizes=[32, 32, 32, 32, 32], stem_out_channels=32, image_size=128),
    "align": dict(vision_config=dict(image_size=128)),
    "speech_to_text": dict(input_feat_per_channel=16),
    "layoutlmv3": dict(coordinate_size=8, shape_size=16, visual_embed=False),
    "bros": dict(dim_bbox=8),
    "lilt": dict(hidden_size=96),
    "mobilebert": dict(embedding_size=32),
    "dots3_note_text": dict(
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=16,
        swa_head_dim=24,
        swa_qk_nope_head_dim=16,
        swa_v_head_dim=16,
    ),
    "esmc": dict(num_key_value_heads=4),
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "longformer": dict(attention_window=[8, 8]),
    "led": dict(attention_window=[8, 8]),
    "fsmt": dict(langs=["en", "de"], src_vocab_size=256, tgt_vocab_size=256),
    "reformer": dict(
        axial_pos_shape=(4, 8), axial_pos_embds_dim=(16, 48), attn_layers=("local", "lsh")
    ),
}

# Inputs beside those that the forward demands: a name of an input kind (batches.Draw), or the value
# itself.
BATCHES = {
    "longt5": dict(attention_mask="attention_mask"),
    "switch_transformers": dict(attention_mask="attention_mask"),
    "longformer": dict(attention_mask="attention_mask"),
    "led": dict(attention_mask="attention_mask"),
    "audio-spectrogram-transformer": dict(input_values="spectrogram"),
    "qwen2_audio": dict(attention_mask="attention_mask"),
    "timesformer": dict(pixel_values="pixel_values_videos"),
    "videomae": dict(pixel_values="pixel_values_videos"),
    "vivit": dict(pixel_values="pixel_values_videos"),
    "speech_to_text": dict(input_features="spectrogram"),
    "lasr_ctc": dict(input_features="spectrogram", attention_mask="frame_mask"),
    "parakeet_ctc": dict(input_features="spectrogram", attention_mask="frame_mask"),
    "granite_speech5_ctc": dict(input_features="spectrogram"),
    "bros": dict(bbox="bbox"),
    "canary": dict(input_features="spectrogram"),
    "cohere_asr": dict(input_features="spectrogram"),
    "modernvbert": dict(pixel_values="images"),
    "ultravbert": dict(pixel_values="images"),
    "musicgen": dict(input_ids=None, labels="codes"),
    "musicgen_melody": dict(input_ids=None, labels="codes"),
    "git": dict(pixel_values="pixel_values"),
    "fsmt": dict(
        decoder_input_ids="decoder_input_ids", decoder_attention_mask="decoder_attention_mask"
    ),
}
