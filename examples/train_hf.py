"""Trains a small GPT-2 with the Trainer of transformers, guarded by one callback. Kill it whenever you like."""

from __future__ import annotations

import argparse
import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from everstep.integrations.transformers import EverstepCallback

NOUNS, VERBS = ["cat", "dog", "bird", "fish", "child"], ["sees", "likes", "follows", "hears", "finds"]


def generated_text(sentences: int, context: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sentences of a tiny grammar, as bytes: enough structure to learn, nothing to download."""
    rng = random.Random(7)
    lines = [f"the {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}." for _ in range(sentences)]
    text = torch.frombuffer(bytearray(" ".join(lines).encode()), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in text[: len(text) // context * context].view(-1, context)]


class Tell(TrainerCallback):
    def on_step_end(self, args: TrainingArguments, state: object, control: object, **_: object) -> None:
        print(f"step {state.global_step}, epoch {state.epoch:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", type=int, default=0, help="let Trainer write checkpoints of its own as often")
    arguments = parser.parse_args()
    settings = TrainingArguments(
        output_dir=f"{arguments.dir}-trainer", num_train_epochs=arguments.epochs, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, learning_rate=3e-3, warmup_steps=4, logging_steps=3, eval_strategy="steps",
        eval_steps=7, save_strategy="steps" if arguments.save else "no", save_steps=arguments.save or 500,
        save_total_limit=2, use_cpu=True, report_to="none", disable_tqdm=True, seed=1,
    )  # fmt: skip
    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    text = generated_text(260)
    trainer = Trainer(model, settings, train_dataset=text[16:], eval_dataset=text[:16], callbacks=[Tell()])
    guarded = EverstepCallback(trainer, dir=arguments.dir)
    trainer.add_callback(guarded)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"resumed from {guarded.run.resumed_from}, now at step {trainer.state.global_step}, {len(losses)} losses")


if __name__ == "__main__":
    main()
