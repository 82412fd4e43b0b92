"""Names that TRL, transformers, peft and axolotl use for what a job document says."""

from fnmatch import fnmatchcase

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "model.pretrained": (
        "base_model",
        "model_name_or_path",
        "model_name",
        "model_id",
        "base_model_config",
    ),
    "model.revision": (
        "model_revision",
        "revision_of_model",
    ),
    "model.vocabulary_size": (
        "resize_token_embeddings",
        "resize_vocab",
    ),
    "model.adapter.modules_to_save": (
        "lora_modules_to_save",
        "trainable_token_indices",
        "additional_target",
    ),
    "model.adapter": (
        "peft_config",
        "lora_config",
        "use_peft",
        "adapter",
        "finetuning_type",
        "peft_type",
        "task_type",
    ),
    "model.adapter.rank": (
        "r",
        "lora_r",
        "lora_rank",
    ),
    "model.adapter.alpha": ("lora_alpha",),
    "model.adapter.dropout": ("lora_dropout",),
    "model.adapter.base": (
        "load_in_4bit",
        "bnb_4bit_quant_type",
        "quantization_config",
        "use_qlora",
    ),
    "model.adapter.targets": (
        "target_modules",
        "lora_target_modules",
        "lora_target_linear",
        "lora_target",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
    ),
    "model.adapter.rslora": (
        "use_rslora",
        "peft_use_rslora",
    ),
    "model.adapter.from": (
        "adapter_name_or_path",
        "lora_model_dir",
        "lora_path",
    ),
    "model.config": (
        "model_type",
        "rope_scaling",
        "rope_theta",
        "overrides_of_model_config",
    ),
    "training.global_batch_sequences": (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "train_batch_size",
        "global_batch_size",
        "batch_size",
    ),
    "training.sequence_length": (
        "max_length",
        "max_seq_length",
        "max_seq_len",
        "sequence_len",
        "cutoff_len",
        "block_size",
    ),
    "training.steps": (
        "max_steps",
        "num_training_steps",
        "train_steps",
    ),
    "training.max_epochs": (
        "num_train_epochs",
        "num_epochs",
        "epochs",
    ),
    "training.learning_rate": ("lr",),
    "training.schedule": (
        "lr_scheduler_type",
        "lr_scheduler",
    ),
    "training.warmup_steps": (
        "warmup_ratio",
        "num_warmup_steps",
    ),
    "training.min_learning_rate_ratio": (
        "cosine_min_lr_ratio",
        "lr_scheduler_kwargs",
    ),
    "training.betas": (
        "adam_beta1",
        "adam_beta2",
    ),
    "training.eps": ("adam_epsilon",),
    "training.clip_norm": (
        "max_grad_norm",
        "gradient_clipping",
        "gradient_clip_val",
        "gradient_clip",
    ),
    "training.precision": (
        "bf16",
        "fp16",
        "torch_dtype",
        "dtype",
        "mixed_precision",
    ),
    "training.recompute": (
        "gradient_checkpointing",
        "activation_checkpointing",
        "use_gradient_checkpointing",
        "use_reentrant",
        "gradient_checkpointing_kwargs",
    ),
    "training.offload": ("activation_offloading",),
    "training.label_smoothing": ("label_smoothing_factor",),
    "training.objective": (
        "loss_type",
        "rl",
        "pref_loss",
        "stage",
    ),
    "training.dpo_beta": (
        "beta",
        "rl_beta",
        "pref_beta",
    ),
    "training.router_balance_weight": ("router_aux_loss_coef",),
    "training.kernels": (
        "use_liger_kernel",
        "liger_kernel",
    ),
    "training.compile_blocks": (
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
    ),
    "training.device": (
        "use_cpu",
        "no_cuda",
    ),
    "training.seed": ("data_seed",),
    "data.source": (
        "datasets",
        "dataset",
        "dataset_name",
        "train_dataset",
        "train_file",
        "data_files",
        "dataset_dir",
    ),
    "data.text_field": (
        "dataset_text_field",
        "field",
    ),
    "data.messages_field": ("field_messages",),
    "data.fields": (
        "field_instruction",
        "field_output",
        "message_property_mappings",
        "formatting_func",
    ),
    "data.chat_template": (
        "chat_template_path",
        "chat_template_jinja",
        "template",
    ),
    "data.train_on": (
        "assistant_only_loss",
        "completion_only_loss",
        "train_on_inputs",
        "roles_to_train",
        "train_on_prompt",
        "mask_history",
    ),
    "data.packing": (
        "sample_packing",
        "packing_strategy",
        "eval_packing",
        "eval_sample_packing",
        "neat_packing",
    ),
    "data.isolate_documents": ("padding_free",),
    "data.tokenizer": (
        "tokenizer_name",
        "tokenizer_config",
        "processing_class",
        "tokenizer_type",
    ),
    "data.end_of_document": ("eos_token",),
    "data.cache": (
        "dataset_prepared_path",
        "cache_dir",
    ),
    "evaluation.source": (
        "eval_dataset",
        "test_datasets",
        "validation_file",
    ),
    "evaluation.split": (
        "val_set_size",
        "test_size",
        "train_test_split",
    ),
    "evaluation.every_steps": (
        "eval_steps",
        "eval_strategy",
        "evaluation_strategy",
        "evals_per_epoch",
    ),
    "evaluation.at_start": ("eval_on_start",),
    "evaluation.early_stopping_patience": ("early_stopping_callback",),
    "checkpoint.storage": ("output_dir",),
    "checkpoint.every": (
        "save_steps",
        "save_strategy",
        "saves_per_epoch",
    ),
    "checkpoint.keep": ("save_total_limit",),
    "checkpoint.keep_best": (
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
    ),
    "parallelism.microbatch_sequences": ("micro_batch_size",),
    "parallelism.max_tp_degree": ("tensor_parallel_size",),
    "parallelism.max_pipeline_stages": ("pipeline_parallel_size",),
    "trackers": (
        "report_to",
        "wandb_project",
        "run_name",
        "wandb_name",
        "wandb_entity",
        "mlflow_tracking_uri",
        "project",
    ),
}
"""Other names by the key of a job; the table in docs/guides/own_data.md shows them."""

KEY_BY_OTHER_NAME = {name: key for key, names in OTHER_NAMES.items() for name in names}

WITHOUT_KEY: dict[str, tuple[str, ...]] = {
    "AdamW is the only optimizer, with training.betas, eps and weight_decay": (
        "optim",
        "optimizer",
        "optim_*",
    ),
    "no noise is added to embeddings": ("neftune_noise_alpha", "noisy_embedding_alpha"),
    "all parameters have training.learning_rate": (
        "embedding_lr",
        "learning_rate_embedding",
        "loraplus_*",
    ),
    "adapters are plain LoRA of one rank, without biases": (
        "use_dora",
        "bias",
        "lora_bias",
        "init_lora_weights",
        "pissa_init",
        "rank_pattern",
        "alpha_pattern",
        "fan_in_fan_out",
        "lora_fan_in_fan_out",
        "loftq_config",
        "layer_replication",
    ),
    "model.adapter.base: nf4 holds a base in four bits, with double quantization; none has eight": (
        "load_in_8bit",
        "bnb_*",
    ),
    "the planner places the model on the GPUs that there are; `parallelism` limits it": (
        "deepspeed",
        "fsdp",
        "fsdp_*",
        "ddp_*",
        "device_map",
        "accelerator_config",
        "parallelism_config",
        "local_rank",
        "num_processes",
    ),
    "context is not parallel": ("context_parallel_size", "sequence_parallel_degree"),
    "rows are prepared once on each node, and shuffled by training.seed": (
        "dataloader_*",
        "dataset_num_proc",
        "dataset_kwargs",
        "preprocessing_num_workers",
        "num_workers",
        "data_collator",
        "remove_unused_columns",
        "shuffle_dataset",
        "shuffle_merged_datasets",
        "curriculum_sampling",
        "group_by_length",
        "train_sampling_strategy",
    ),
    "rows are packed, and padding counts nothing": ("pad_token", "pad_to_*"),
    "what exceeds a row is cut at its end; a preference has half a row for each answer": (
        "truncation_mode",
        "max_prompt_length",
        "max_completion_length",
    ),
    "save tokens with the tokenizer; model.vocabulary_size gives them rows": (
        "special_tokens",
        "tokens",
        "add_tokens",
    ),
    "attention is chosen by device and data": (
        "attn_implementation",
        "flash_attention",
        "sdp_attention",
        "xformers_attention",
    ),
    "evaluations run in the plan and precision of training": (
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "bf16_full_eval",
        "fp16_full_eval",
        "prediction_loss_only",
        "batch_eval_metrics",
    ),
    "training.precision names the number format": ("tf32",),
    "training keeps no keys and values": ("use_cache",),
    "sums are over the targets of all GPUs": ("average_tokens_across_devices",),
    "parallelism.microbatch_sequences, or the planner, sets the microbatch": (
        "auto_find_batch_size",
    ),
    "results are equal on any fleet up to the order of sums": ("full_determinism",),
    "`autohet train` does it where the job has the section": ("do_train", "do_eval", "do_predict"),
    "each step is an event, which trackers and `autohet report` show": (
        "logging_*",
        "log_*",
        "disable_tqdm",
        "plot_loss",
        "include_tokens_per_second",
        "include_num_input_tokens_seen",
    ),
    "the same command resumes from checkpoint.storage": (
        "resume_from_checkpoint",
        "ignore_data_skip",
        "overwrite_output_dir",
        "auto_resume_from_checkpoints",
    ),
    "`autohet checkpoint export` writes what transformers and peft read": (
        "save_only_model",
        "save_safetensors",
        "push_to_hub",
        "hub_*",
    ),
    "the reference is the model without its adapters": (
        "ref_model",
        "ref_model_*",
        "sync_ref_model",
        "reference_free",
        "precompute_ref_*",
    ),
    "the loss of preferences is DPO's own (sigmoid)": (
        "rpo_alpha",
        "ld_alpha",
        "f_divergence_type",
        "loss_weights",
        "use_weighting",
    ),
    "preferences are trained without dropout": ("disable_dropout",),
}
"""Names without a key, which may end in *, by the reason; the guide shows them, too."""


def reason_without_key(name: str) -> str | None:
    """Return why a job has no key for another library's name; None for other names."""
    for reason, patterns in WITHOUT_KEY.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return reason
    return None
