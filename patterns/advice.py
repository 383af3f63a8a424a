"""What each reason means and what a user can do about it, for reports and docs/reasons.md."""

from __future__ import annotations

from dataclasses import dataclass

from .reason import Reason


@dataclass(frozen=True)
class Advice:
    """One sentence each: what a reason says of the program, and what would change it."""

    meaning: str
    remedy: str


ADVICE: dict[Reason, Advice] = {
    Reason.TRAINING: Advice(
        "The graph is compiled for a gradient, and the fused operator has none.",
        "Call the compiled function under torch.no_grad() or torch.inference_mode().",
    ),
    Reason.DROPOUT: Advice(
        "Dropout zeroes weights of the attention, or elements of its output or gate.",
        "Put the model into eval mode, or pass dropout_p=0.0, or training=False to F.dropout.",
    ),
    Reason.CAUSAL: Advice(
        "is_causal=True stands beside a mask, or leaves open which keys a query token sees.",
        "Pass one boolean mask that says which keys each query token sees, and no is_causal.",
    ),
    Reason.NO_GATE: Advice(
        "The attention output goes to something else than a multiplication.",
        "Nothing is to be done for an attention without a gate; otherwise multiply by the gate "
        "first, before any other arithmetic.",
    ),
    Reason.LEAVES_GRAPH: Advice(
        "The attention output is a result of the graph; a gate, if there is one, comes after it.",
        "Find the graph break (TORCH_LOGS=graph_breaks) between attention and gate and remove it; "
        "fullgraph=True refuses one. Nothing is to be done for an attention without a gate.",
    ),
    Reason.NOT_SIGMOID: Advice(
        "The output is multiplied by something that is no plain sigmoid.",
        "Another activation needs another kernel; move factors and offsets out of the gate, to "
        "after the product; slice, shard or reduce the gate before its sigmoid.",
    ),
    Reason.GATE_LAYOUT: Advice(
        "The gate does not have one value for each element, head, token or batch row of the "
        "output.",
        "Give the gate the shape of the output, or sizes of 1 where it is broadcast.",
    ),
    Reason.GATE_DTYPE: Advice(
        "The gate or the product is in a dtype, or rounds more than once in a way, that the "
        "kernel does not reproduce.",
        "Multiply in the attention's dtype or in float32, and cast the sigmoid at most once.",
    ),
    Reason.OUTPUT_USED: Advice(
        "The output before the gate is used by something else than the gate, so that it must be "
        "computed anyway.",
        "Drop the other use, or take it from the gated result. A norm between output and gate is "
        "such a use: only one after the product leaves an attention that can be fused.",
    ),
    Reason.STATISTICS_USED: Advice(
        "Something inside the attention, such as logsumexp or the weights, is used as well.",
        "Do not return attention weights or logsumexp from the compiled step.",
    ),
    Reason.ATTENTION_LAYOUT: Advice(
        "The operands or the output are not arranged as those of an attention over batch, heads, "
        "tokens and head_dim.",
        "Keep these four apart: do not reshape across two of them between attention and gate. Keep "
        "the number of heads static: with dynamic=True it may become a symbol.",
    ),
    Reason.KEY_VALUE_LAYOUT: Advice(
        "K and V cannot be read as heads that are shared by the query heads.",
        "Keep batch and heads in dimensions of their own, and the number of heads static.",
    ),
    Reason.MASK_LAYOUT: Advice(
        "The mask does not broadcast to (batch, heads, query tokens, keys).",
        "Give the mask four dimensions, with sizes of 1 where it is broadcast.",
    ),
    Reason.MASK_DTYPE: Advice(
        "The mask is in a dtype that the kernel does not read.",
        "Use a boolean mask, or one in bfloat16, float16 or float32.",
    ),
    Reason.MASK_FILL: Advice(
        "Hidden keys get a finite score in one place and are skipped in another.",
        "Fill with -inf.",
    ),
    Reason.SCALE: Advice(
        "The scale of the logits is not a finite constant.",
        "Pass a Python number as scale, and keep head_dim static.",
    ),
    Reason.SINKS: Advice(
        "The extra logits of the softmax are not one for each query head, or its weights change "
        "places before those of the sinks are dropped.",
        "Use one sink a head, shared by batch and query tokens, and drop its weight first.",
    ),
    Reason.LOGITS: Advice(
        "Something other than one constant scale and then one mask happens to the logits, such as "
        "a softcap.",
        "Fold scales into one, and masks into one that is added last; a softcap needs another "
        "kernel.",
    ),
    Reason.SCORE_MOD: Advice(
        "score_mod does more than scale, mask or add a bias that is looked up.",
        "Move masking to mask_mod, and look a bias up in a captured tensor.",
    ),
    Reason.MASK_MOD: Advice(
        "mask_mod computes with more than integers and booleans on its indices and captured "
        "tensors.",
        "Compute in advance what needs floating arithmetic, and look it up in mask_mod.",
    ),
    Reason.BLOCK_MASK: Advice(
        "The block mask does not list its blocks once for all, or once for each, of batch and "
        "heads.",
        "Make the block mask with the batch and heads of this call, or with None for either.",
    ),
    Reason.KERNEL_OPTION: Advice(
        "A kernel option of flex_attention is not known to leave the result as it is.",
        "Leave the option out.",
    ),
    Reason.STRIDES_USED: Advice(
        "The gated product is read by its strides, which the fused operator does not keep.",
        "Use view or reshape in place of as_strided.",
    ),
    Reason.MUTATION: Advice(
        "An operand is written in place between where it is read and the gated product.",
        "Write to the cache before the attention, or after the gate.",
    ),
    Reason.DEVICE: Advice(
        "The device is not asked for, or the kernels are not made for it.",
        "Name the device in the setting, as in FUSION_PASS_DEVICES=cuda,cpu; a GPU must be sm_80 "
        "or later; a package for a CPU cannot hold the operator.",
    ),
    Reason.MIXED_DEVICES: Advice(
        "The operands of one attention are on several devices.",
        "Move the mask, the gate and the cache to the device of the query.",
    ),
    Reason.DTYPE: Advice(
        "Query, K and V are not all in the same one of bfloat16, float16 and float32.",
        "Keep the cache in the model's dtype, and the model in one of the three.",
    ),
    Reason.NUMERICS: Advice(
        'Under numerics="eager" a sigmoid that is spelled out rounds at every step, and a cast to '
        "a narrower dtype rounds the logits or the weights.",
        'Write torch.sigmoid(x), drop the cast, or use numerics="compiled" or "fp32".',
    ),
    Reason.QUERY_TOKENS: Advice(
        "There are more query tokens than a decode step has, or their number is not static.",
        "Nothing is to be done for a prefill; compile the decode step by itself, with a static "
        "number of query tokens (torch._dynamo.mark_static).",
    ),
    Reason.HEAD_DIM: Advice(
        "The head dimension is not one that the kernel has tiles for.",
        "Pad head_dim to a multiple of 8 from 16 to 512.",
    ),
    Reason.GROUP: Advice(
        "More query heads share one K/V head than fit a tile.",
        "Split the query heads over more K/V heads.",
    ),
    Reason.UNPROFITABLE: Advice(
        "The kernel could run it, but the policy says no, or nothing measured says that it pays.",
        "Measure with python -m fusion_pass tune, or set FUSION_PASS_POLICY=always.",
    ),
    Reason.TORCH: Advice(
        "This torch is newer than those tested, and lacks something that the fusion rests on.",
        "Update fusion_pass, or use a torch that it was tested with.",
    ),
    Reason.INTERNAL: Advice(
        "The pass failed on this attention, and left it as it was.",
        "Please report the logged traceback; FUSION_PASS_STRICT=1 raises it.",
    ),
}
"""One entry for every `Reason`."""
