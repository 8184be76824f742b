"""Times whole training steps with PyTorch, shaped like bench/train_step.cpp: same model, same optimizer, one JSON line."""
import argparse
import contextlib
import json
import math
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.qkv(self.norm1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(a.vocabulary, a.width), nn.Embedding(a.context, a.width)
        self.blocks = nn.ModuleList(Block(a.width, a.heads) for _ in range(a.layers))
        self.norm = nn.LayerNorm(a.width)
        for p in self.parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(32), nn.BatchNorm2d(64)
        self.hidden, self.head = nn.Linear(64 * 49, 128), nn.Linear(128, 10)
        self.drop = nn.Dropout(0.25)

    def forward(self, x, targets):
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2))
        return F.cross_entropy(self.head(self.drop(F.relu(self.hidden(x.flatten(1))))), targets)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x, targets):
        return F.cross_entropy(self.layers(x), targets)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="gpt", choices=["gpt", "cnn", "mlp"])
    p.add_argument("--precision", default="bf16-mixed", choices=["fp32", "tf32", "fp16-mixed", "bf16-mixed"])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--profile", action="store_true", help="print the GPU time of each kernel, in microseconds a step, instead")
    for name, value in dict(batch=16, context=1024, width=768, layers=12, heads=12, vocabulary=50304, steps=20, warmup=8, threads=0).items():
        p.add_argument(f"--{name}", type=int, default=value)
    a = p.parse_args()
    if a.threads:
        torch.set_num_threads(a.threads)
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = a.precision == "tf32"
    model = {"gpt": lambda: GPT(a), "cnn": CNN, "mlp": MLP}[a.model]().to(a.device)
    if a.model == "gpt":
        x = torch.randint(a.vocabulary, (a.batch, a.context), device=a.device)
        y = torch.randint(a.vocabulary, (a.batch, a.context), device=a.device)
    else:
        x = torch.randn((a.batch, 1, 28, 28) if a.model == "cnn" else (a.batch, 784), device=a.device)
        y = torch.randint(10, (a.batch,), device=a.device)
        if a.model == "cnn":
            x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
    cuda = a.device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=cuda or None)
    scaler = torch.amp.GradScaler(a.device.split(":")[0], enabled=a.precision == "fp16-mixed")
    dtype = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(a.precision)
    run = torch.compile(model) if a.compile else model

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(a.device.split(":")[0], dtype) if dtype else contextlib.nullcontext():
            loss = run(x, y)
        scaler.scale(loss).backward()
        if a.model == "gpt":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    sync = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(a.warmup):
        step()
    sync()
    if a.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            sync()
        rows = [(e.self_device_time_total, e.count, e.key[:100]) for e in profile.key_averages() if e.self_device_time_total > 0]
        for time_us, count, name in sorted(rows, reverse=True)[:40]:
            print(f"{time_us:10.1f} {count:5d} {name}")
        print(f"{sum(r[0] for r in rows):10.1f} {sum(r[1] for r in rows):5d} total")
        return
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for _ in range(a.steps):
        step()
    sync()
    pipelined = (time.perf_counter() - begin) / a.steps * 1e3
    times = []
    for _ in range(a.steps):
        begin = time.perf_counter()
        loss = step()
        sync()
        times.append((time.perf_counter() - begin) * 1e3)
    ms = statistics.median(times)
    tokens = a.batch * (a.context if a.model == "gpt" else 1)
    print(json.dumps(dict(who="pytorch " + torch.__version__ + (" compiled" if a.compile else ""), model=a.model, precision=a.precision, batch=a.batch,
                          ms=round(ms, 4), ms_pipelined=round(pipelined, 4), per_second=round(tokens / ms * 1e3), loss=loss.item(),
                          peak_mib=round(torch.cuda.max_memory_allocated() / 2**20) if cuda else None)), flush=True)


if __name__ == "__main__":
    main()
