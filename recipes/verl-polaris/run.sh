#!/usr/bin/env bash
# bash recipes/verl-polaris/run.sh 1.7b|4b|8b|14b [verl's overrides, which win over those below]
# GRPO of Qwen3 on Polaris-53K in verl with sparse rollouts under the published 0.86 schedule (Sparrow, arXiv 2606.08446),
# on NODES (1) machines of 8 GPUs. DATA is the folder that prepare.py wrote.
# Where a value comes from: "published" is the paper, "release" its released example scripts and their defaults,
# "Polaris" the published training script of that data set, "ours" nobody's but ours.
set -euo pipefail
size="${1:?one of 1.7b 4b 8b 14b}"; shift
data="${DATA:-data/verl-polaris}" nodes="${NODES:-1}"
here="$(cd "$(dirname "$0")" && pwd)"
case "$size" in
    1.7b) model=Qwen/Qwen3-1.7B tensor=1 offload=False ;;
    4b) model=Qwen/Qwen3-4B tensor=1 offload=False ;;
    8b) model=Qwen/Qwen3-8B tensor=1 offload=False ;;
    14b) model=Qwen/Qwen3-14B tensor=2 offload=True ;;       # ours: the cache of one GPU would hold few responses
    *) echo "error: no size $size; choose 1.7b, 4b, 8b or 14b" >&2; exit 2 ;;
esac

sparse=(
    trainer.v1.trainer_mode=sparroll_sync
    "+actor_rollout_ref.rollout.custom.sparroll.schedule=qwen3-$size-0.86"              # published
    +actor_rollout_ref.rollout.custom.sparroll.correction.name=tis                      # published
    +actor_rollout_ref.rollout.custom.sparroll.correction.weight_max=3.0                # published: 2 to 3
    +actor_rollout_ref.rollout.custom.sparroll.guard.at_least=0.84                      # ours: a little below the schedule's .86
    +actor_rollout_ref.rollout.custom.sparroll.control.by=guard                         # ours: an alarm ends the savings
    '+actor_rollout_ref.rollout.custom.sparroll.control.stricter=[dense]'               # ours
)
published=(
    algorithm.adv_estimator=grpo                                                        # published
    data.max_prompt_length=3000                                                         # release
    data.max_response_length=37888                                                      # published: "37K"
    data.train_batch_size=128                                                           # Polaris
    actor_rollout_ref.actor.ppo_mini_batch_size=128                                     # release: one update a step
    actor_rollout_ref.actor.optim.lr=1e-6                                               # release and Polaris
    actor_rollout_ref.actor.optim.weight_decay=0.01                                     # release
    actor_rollout_ref.actor.clip_ratio_low=0.2                                          # published
    actor_rollout_ref.actor.clip_ratio_high=0.28                                        # published
    actor_rollout_ref.actor.use_kl_loss=False                                           # published
    actor_rollout_ref.actor.loss_agg_mode=token-mean                                    # published
    actor_rollout_ref.rollout.n=8                                                       # release
    actor_rollout_ref.rollout.temperature=1.0                                           # release
    actor_rollout_ref.rollout.val_kwargs.n=16                                           # release
    actor_rollout_ref.rollout.val_kwargs.do_sample=True                                 # release
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0                                # release
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7                                      # release
    trainer.total_training_steps=550                                                    # ours; figures reach step 550
    trainer.test_freq=100                                                               # release
    trainer.save_freq=10                                                                # release
)
machine=(                                                                               # all ours
    "actor_rollout_ref.model.path=$model"
    actor_rollout_ref.actor.strategy=fsdp2
    "actor_rollout_ref.actor.fsdp_config.param_offload=$offload"
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=$offload"
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40960                             # the longest prompt and response
    actor_rollout_ref.rollout.name=vllm
    "actor_rollout_ref.rollout.tensor_model_parallel_size=$tensor"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.max_num_seqs=128
    actor_rollout_ref.rollout.max_model_len=40960
    "data.train_files=$data/train.parquet"
    "data.val_files=$data/eval.parquet"
    data.filter_overlong_prompts=True
    "reward.custom_reward_function.path=$here/reward.py"
    trainer.n_gpus_per_node=8
    "trainer.nnodes=$nodes"
    "trainer.experiment_name=qwen3-$size-sparse"
    trainer.project_name=sparroll-polaris
    'trainer.logger=[console,file]'
)
exec "${PYTHON:-python}" -m sparroll.verl "${machine[@]}" "${published[@]}" "${sparse[@]}" "$@"
