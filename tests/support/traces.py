"""Records built by hand, op by op, for analyzers to read: no model, no torch.

`Recording` has one method for each op; a value is the index of a tensor. `llama()` records two layers of a Llama.
"""

from __future__ import annotations

from introspect.records import (
    AttentionCall,
    CacheTensor,
    ExpertCall,
    Gemm,
    ModelIdentity,
    Op,
    Parameter,
    RunShape,
    Tensor,
    Trace,
)
from introspect.units import tensor_bytes


class Recording:
    """Ops and tensors in the making. Each method appends ops and returns the index of its result."""

    def __init__(self, *, dtype="bf16", **run):
        self.dtype = dtype
        self.run = RunShape(**{"phase": "prefill", "batch": 1, "seq": 6, "dtype": dtype, **run})
        self.tensors, self.ops, self.parameters, self.cache = [], [], {}, []
        self.modules = {"": "Root"}
        self.storages = 0

    def tensor(self, shape, *, dtype=None, role="activation", parameter=None, storage=None):
        """A view of a new storage, or of `storage`."""
        dtype = dtype or self.dtype
        if storage is None:
            storage, self.storages = self.storages, self.storages + 1
        held = max((t.storage_bytes for t in self.tensors if t.storage == storage), default=0)
        self.tensors.append(
            Tensor(
                storage=storage,
                offset=0,
                shape=tuple(shape),
                dtype=dtype,
                role=role,
                parameter=parameter,
                storage_bytes=held or tensor_bytes(tuple(shape), dtype),
            )
        )
        return len(self.tensors) - 1

    def parameter(self, path, shape):
        """A view of a parameter, made at its first use."""
        if path not in self.parameters:
            self.parameters[path] = self.tensor(shape, role="weight", parameter=path)
        return self.parameters[path]

    def tie(self, path, first):
        """A second path of a parameter."""
        self.parameters[path] = self.parameters[first]

    def op(self, name, inputs, shape, *, kind="elementwise", module="", out=None, **facts):
        """One op with one result. `out`: an existing tensor that is written in place."""
        self._see(module)
        dtype = facts.pop("dtype", None)
        result = self.tensor(shape, dtype=dtype) if out is None else out
        self.ops.append(
            Op(
                name=f"aten.{name}.default",
                module=module,
                kind=kind,
                inputs=tuple(inputs),
                outputs=(result,),
                **facts,
            )
        )
        return result

    def _see(self, module):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            self.modules.setdefault(".".join(parts[:end]), "Module")

    def view(self, x, shape, *, module=""):
        """The same storage under another shape."""
        result = self.tensor(shape, dtype=self.tensors[x].dtype, storage=self.tensors[x].storage)
        return self.op("view", (x,), shape, kind="layout", module=module, out=result)

    def lookup(self, path, rows, width, tokens):
        """Rows of a table by index."""
        ids = self.tensor((self.run.batch, self.run.seq), dtype="int64", role="index")
        table = self.parameter(path, (rows, width))
        shape = (self.run.batch, tokens // self.run.batch, width)
        return self.op("embedding", (table, ids), shape, kind="lookup", module=path.rpartition(".")[0])

    def linear(self, x, path, n, *, bias=False):
        """[rows, k] x [k, n] with the parameter `path`.weight of shape [n, k]."""
        *lead, k = self.tensors[x].shape
        rows = 1
        for size in lead:
            rows *= size
        flat = self.view(x, (rows, k), module=path)
        weight = self.parameter(f"{path}.weight", (n, k))
        transposed = self.tensor(
            (k, n), role="weight", parameter=f"{path}.weight", storage=self.tensors[weight].storage
        )
        extra = (self.parameter(f"{path}.bias", (n,)),) if bias else ()
        out = self.tensor((rows, n))
        gemm = Gemm(kind="linear", batch=1, m=rows, k=k, n=n, lhs=flat, rhs=transposed, out=out)
        name = "addmm" if bias else "mm"
        self.op(name, (*extra, flat, transposed), (rows, n), kind="gemm", module=path, out=out, gemms=(gemm,))
        return self.view(out, (*lead, n), module=path)

    def norm(self, x, path):
        """RMSNorm as transformers writes it: eight ops, in fp32, the weight last."""
        shape = self.tensors[x].shape
        row = (*shape[:-1], 1)
        wide = self.op("_to_copy", (x,), shape, kind="cast", module=path, dtype="fp32")
        square = self.op("pow", (wide,), shape, module=path, dtype="fp32")
        mean = self.op("mean", (square,), row, kind="reduction", module=path, dtype="fp32")
        root = self.op(
            "rsqrt", (self.op("add", (mean,), row, module=path, dtype="fp32"),), row, module=path, dtype="fp32"
        )
        scaled = self.op("mul", (wide, root), shape, module=path, dtype="fp32")
        narrow = self.op("_to_copy", (scaled,), shape, kind="cast", module=path)
        return self.op("mul", (self.parameter(f"{path}.weight", shape[-1:]), narrow), shape, module=path)

    def attention(self, q, k, v, *, heads, kv_heads, width, module, v_width=None, pairs=None, window=None, bias=None):
        """The fused op on q [B, H, S, D], k [B, G, T, D] and v [B, G, T, Dv]; causal unless `pairs` says otherwise.
        `bias` is added to the scores."""
        batch, seq = self.run.batch, self.run.seq
        keys = self.run.context + seq
        v_width = v_width or width
        views = [
            self.view(q, (batch, heads, seq, width), module=module),
            self.view(k, (batch, kv_heads, keys, width), module=module),
            self.view(v, (batch, kv_heads, keys, v_width), module=module),
        ]
        out = self.tensor((batch, seq, heads, v_width))
        causal = batch * sum(range(self.run.context + 1, keys + 1))
        call = AttentionCall(
            q=views[0],
            k=views[1],
            v=views[2],
            out=out,
            query_heads=heads,
            kv_heads=kv_heads,
            visible_pairs=causal if pairs is None else pairs,
            causal=pairs is None,
            window=window,
        )
        scores = Gemm(
            kind="attention_qk", batch=batch * heads, m=seq, k=width, n=keys, lhs=views[0], rhs=views[1], out=None
        )
        context = Gemm(
            kind="attention_pv", batch=batch * heads, m=seq, k=keys, n=v_width, lhs=None, rhs=views[2], out=out
        )
        inputs = views if bias is None else [*views, bias]
        self.op("attention", inputs, (), kind="gemm", module=module, out=out, gemms=(scores, context), attention=call)
        return self.view(out, (batch, seq, heads * v_width), module=module)

    def cached(self, x, layer, name, shape):
        """Append x to what the cache holds of it (`context` rows before the step); the whole, as attention reads it."""
        *lead, rows, width = shape
        before = (*lead, self.run.context, width)
        held = self.tensor(before, role="cache") if self.run.context else None
        whole = self.tensor((*lead, self.run.context + rows, width), role="cache")
        inputs = (x,) if held is None else (held, x)
        self.op("cat", inputs, (), kind="cache_write", module=f"layers.{layer}.attn", out=whole)
        self.cache.append(
            CacheTensor(
                layer=layer,
                layer_class="DynamicLayer",
                name=name,
                dtype=self.dtype,
                shape_before=before if self.run.context else None,
                shape_after=self.tensors[whole].shape,
                storage=self.tensors[whole].storage,
            )
        )
        return whole

    def grouped(self, x, path, n, call):
        """Row blocks of x [R, k] times one matrix an expert."""
        rows, k = self.tensors[x].shape
        weight = self.parameter(path, (call.experts, n, k))
        out = self.tensor((rows, n))
        busy = sum(1 for count in call.rows if count)
        gemm = Gemm(
            kind="grouped", batch=busy, m=-(-rows // busy), k=k, n=n, rows=sum(call.rows), lhs=x, rhs=weight, out=out
        )
        module = path.rpartition(".")[0]
        self.op("grouped_linear", (x, weight), (), kind="gemm", module=module, out=out, gemms=(gemm,), experts=call)
        return out

    def trace(self, **facts):
        """The record so far."""
        touched = {self.tensors[i].parameter for op in self.ops for i in op.inputs}
        owners = {path: self.tensors[i].parameter for path, i in self.parameters.items()}
        parameters = [
            Parameter(
                path=path,
                shape=self.tensors[i].shape,
                dtype=self.dtype,
                touched=owners[path] in touched,
                tied_to=None if owners[path] == path else owners[path],
            )
            for path, i in self.parameters.items()
        ]
        return Trace(
            model=ModelIdentity(id="by hand", class_name="Model", source="a test", config_sha256="", config={}),
            run=self.run,
            versions={},
            modules=self.modules,
            parameters=tuple(parameters),
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            cache=tuple(self.cache),
            **facts,
        )


HIDDEN, HEADS, KV_HEADS, WIDTH, INNER, VOCABULARY = 32, 4, 2, 8, 81, 625


def llama_layer(r, x, layer, ffn=None):
    """One pre-norm layer: grouped-query attention and a gated FFN (or `ffn(recording, x)`)."""
    path = f"layers.{layer}"
    tokens = r.run.tokens
    normed = r.norm(x, f"{path}.norm1")
    q = r.linear(normed, f"{path}.attn.q", HEADS * WIDTH)
    k = r.linear(normed, f"{path}.attn.k", KV_HEADS * WIDTH)
    v = r.linear(normed, f"{path}.attn.v", KV_HEADS * WIDTH)
    shape = (r.run.batch, KV_HEADS, r.run.seq, WIDTH)
    k, v = (r.cached(part, layer, name, shape) for part, name in ((k, "keys"), (v, "values")))
    mixed = r.attention(q, k, v, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, module=f"{path}.attn")
    x = r.op("add", (x, r.linear(mixed, f"{path}.attn.o", HIDDEN)), r.tensors[x].shape, module=path)
    normed = r.norm(x, f"{path}.norm2")
    out = ffn(r, normed) if ffn else gated_ffn(r, normed, f"{path}.ffn", INNER)
    assert r.tensors[out].elements == tokens * HIDDEN
    return r.op("add", (x, out), r.tensors[x].shape, module=path)


def gated_ffn(r, x, path, inner):
    """down(silu(gate(x)) * up(x))."""
    gate, up = (r.linear(x, f"{path}.{name}", inner) for name in ("gate", "up"))
    shape = r.tensors[gate].shape
    act = r.op("silu", (gate,), shape, kind="activation", module=f"{path}.act")
    return r.linear(r.op("mul", (act, up), shape, module=path), f"{path}.down", HIDDEN)


def moe_ffn(path, *, experts=8, top_k=2, inner=27, shared=None):
    """An FFN of routed experts (and a gated shared one of width `shared`), as `llama_layer` takes it."""

    def build(r, x):
        tokens = r.run.tokens
        scores = r.linear(x, f"{path}.gate", experts)
        probabilities = r.op("_softmax", (scores,), (tokens, experts), kind="softmax", module=f"{path}.gate")
        chosen = r.op("topk", (probabilities,), (tokens, top_k), kind="topk", module=f"{path}.gate")
        order = r.op("sort", (chosen,), (tokens * top_k,), kind="sort", module=f"{path}.experts", dtype="int64")
        rows = r.op("index", (x, order), (tokens * top_k, HIDDEN), kind="gather", module=f"{path}.experts")
        share, extra = divmod(tokens * top_k, experts)
        call = ExpertCall(
            experts=experts, top_k=top_k, tokens=tokens, rows=tuple(share + (e < extra) for e in range(experts))
        )
        up = r.grouped(rows, f"{path}.experts.gate_up", 2 * inner, call)
        halves = [r.view(up, (tokens * top_k, inner), module=f"{path}.experts") for _ in range(2)]
        act = r.op("silu", halves[:1], (tokens * top_k, inner), kind="activation", module=f"{path}.experts")
        gated = r.op("mul", (act, halves[1]), (tokens * top_k, inner), module=f"{path}.experts")
        down = r.grouped(gated, f"{path}.experts.down", HIDDEN, call)
        weighted = r.op("mul", (down, chosen), (tokens * top_k, HIDDEN), module=f"{path}.experts")
        out = r.op("sum", (weighted,), (tokens, HIDDEN), kind="reduction", module=f"{path}.experts")
        out = r.view(out, r.tensors[x].shape, module=path)
        if shared is None:
            return out
        return r.op("add", (out, gated_ffn(r, x, f"{path}.shared", shared)), r.tensors[x].shape, module=path)

    return build


def llama(*, layers=2, ffn=None, **run):
    """Two layers (or more), an untied head; `ffn(layer)` may give another FFN for a layer."""
    r = Recording(**run)
    x = r.lookup("embed.weight", VOCABULARY, HIDDEN, r.run.tokens)
    for layer in range(layers):
        x = llama_layer(r, x, layer, ffn(layer) if ffn else None)
    r.linear(r.norm(x, "norm"), "head", VOCABULARY)
    return r.trace()


LATENT = {"rank": 27, "nope": 11, "rope": 5, "value": 7}


def latent_layer(r, x, layer):
    """One layer of latent attention: cached latent of `rank` and one rotary key, expanded to HEADS keys and values."""
    path = f"layers.{layer}.attn"
    rank, nope, rope, value = LATENT.values()
    batch, seq, keys = r.run.batch, r.run.seq, r.run.context + r.run.seq
    q = r.linear(x, f"{path}.q", HEADS * (nope + rope))
    down = r.linear(x, f"{path}.kv_a", rank + rope)
    latent = r.norm(r.view(down, (batch, seq, rank), module=path), f"{path}.kv_norm")
    latent = r.cached(latent, layer, "keys", (batch, 1, seq, rank))
    rotary = r.cached(r.view(down, (batch, seq, rope), module=path), layer, "values", (batch, 1, seq, rope))
    expanded = r.linear(latent, f"{path}.kv_b", HEADS * (nope + value))
    k = r.op("new_empty", (expanded,), (batch, HEADS, keys, nope + rope), kind="factory", module=path)
    for part, width in ((expanded, nope), (rotary, rope)):
        source = r.view(part, (batch, HEADS, keys, width), module=path)
        target = r.view(k, (batch, HEADS, keys, width), module=path)
        r.op("copy_", (target, source), (), kind="copy", module=path, out=target)
    v = r.view(expanded, (batch, HEADS, keys, value), module=path)
    mixed = r.attention(q, k, v, heads=HEADS, kv_heads=HEADS, width=nope + rope, v_width=value, module=path)
    return r.op("add", (x, r.linear(mixed, f"{path}.o", HIDDEN)), r.tensors[x].shape, module=f"layers.{layer}")


def latent_model(**run):
    """One layer of latent attention between a lookup and a head."""
    r = Recording(**run)
    x = latent_layer(r, r.lookup("embed.weight", VOCABULARY, HIDDEN, r.run.tokens), 0)
    r.linear(r.norm(x, "norm"), "head", VOCABULARY)
    return r.trace()
