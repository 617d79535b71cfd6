"""The failing models of this package: the thread each comes from, its fault, and the line that cured it.

`source` is the public thread. The code and the sentences are our own, and so is the number of an eps that the thread
leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Cure:
    """One failing model and its cure.

    `module` is the module whose forward has the fault, "" for the root, and "-" for code outside all modules.
    `operation` is its name in torch.ops.aten, in the backward phase that of the forward operation whose gradient fails.
    `line` is the line that the cure replaces by `fixed`, both without indentation. `made_at` is the line that runs the
    operation, where that is another one. A model with `steps` above 1 is trained, and its last step fails. `inferred`:
    the thread explains the fault, and the line follows from that. The other threads show or describe the line.
    """

    name: str
    source: str
    saw: str
    phase: str
    module: str
    operation: str
    line: str
    fixed: str
    cause: str
    made_at: str = ""
    steps: int = 1
    inferred: bool = False

    @property
    def path(self) -> Path:
        return MODELS / f"{self.name}.py"

    @property
    def culprit(self) -> str:
        """The line that runs the operation."""
        return self.made_at or self.line

    def number(self) -> int:
        """The number of `line` in the file, from 1."""
        found = [
            i for i, text in enumerate(self.path.read_text().splitlines(), 1) if text.strip() == self.line
        ]
        if len(found) != 1:
            raise ValueError(f"{self.name} should have its line once, got lines {found}")
        return found[0]

    def cured(self) -> str:
        """The source with the cure in place."""
        lines = self.path.read_text().splitlines(keepends=True)
        at = self.number() - 1
        lines[at] = lines[at].replace(self.line, self.fixed)
        return "".join(lines)


CURES = [
    Cure(
        name="dice_empty",
        source="https://github.com/nasa/delta/pull/115",
        saw=("The dice loss was nan for tiles in which neither the prediction nor the label marks a pixel."),
        phase="forward",
        module="criterion.dice",
        operation="div",
        line="return 1 - 2 * overlap / total",
        fixed="return 1 - 2 * overlap / (total + 1e-7)",
        cause="division",
    ),
    Cure(
        name="ciou_aspect",
        source="https://github.com/ultralytics/yolov5/pull/8546",
        saw="The CIoU box loss became nan for boxes whose width and height are both zero.",
        phase="forward",
        module="loss_box",
        operation="div",
        line="v = (4 / math.pi**2) * (torch.atan(w2 / h2) - torch.atan(w1 / h1)).pow(2)",
        fixed=(
            "v = (4 / math.pi**2) * (torch.atan(w2 / (h2 + self.eps)) - torch.atan(w1 / (h1 + "
            "self.eps))).pow(2)"
        ),
        cause="division",
    ),
    Cure(
        name="supcon_no_positive",
        source="https://github.com/HobbitLong/SupContrast/issues/141",
        saw=(
            "The supervised contrastive loss was nan for each anchor that has no other sample of its "
            "class in the batch."
        ),
        phase="forward",
        module="criterion",
        operation="div",
        line="mean_log_prob = (positives * log_prob).sum(1) / positives.sum(1)",
        fixed="mean_log_prob = (positives * log_prob).sum(1) / positives.sum(1).clamp(min=1)",
        cause="division",
    ),
    Cure(
        name="pna_attenuation",
        source="https://github.com/pyg-team/pytorch_geometric/pull/6609",
        saw="The inverse-linear degree scaler gave inf and nan for nodes without a neighbour.",
        phase="forward",
        module="conv.scale",
        operation="reciprocal",
        line="return h * (self.average / degree)",
        fixed="return h * (self.average / degree.clamp(min=1))",
        cause="division",
    ),
    Cure(
        name="cov_weighting",
        source="https://github.com/rickgroen/cov-weighting/issues/3",
        saw="All weighted losses were nan after one of the tasks had reached a loss of zero.",
        phase="forward",
        module="weighting",
        operation="div",
        line="ratios = losses / self.running_mean",
        fixed="ratios = losses / (self.running_mean + 1e-8)",
        cause="division",
    ),
    Cure(
        name="sisdr_silent_target",
        source="https://github.com/csteinmetz1/auraloss/pull/26",
        saw="The SI-SDR loss was nan when the target signal was all zeros.",
        phase="forward",
        module="loss",
        operation="div",
        line="alpha = (estimate * target).sum(-1, keepdim=True) / energy",
        fixed="alpha = (estimate * target).sum(-1, keepdim=True) / (energy + self.eps)",
        cause="division",
    ),
    Cure(
        name="difformer_sigmoid",
        source="https://github.com/qitianwu/DIFFormer/issues/3",
        saw=(
            "Training with the sigmoid kernel gave nan, as the attention normaliser is a sum of "
            "sigmoids that can be zero."
        ),
        phase="forward",
        module="attn.kernel",
        operation="div",
        line="weights = torch.sigmoid(scores)",
        fixed="weights = torch.sigmoid(scores.clamp(min=-30))",
        cause="division",
        made_at="return (weights / normaliser) @ v",
    ),
    Cure(
        name="gradcam_pp_weights",
        source="https://github.com/frgfm/torch-cam/pull/187",
        saw="The Grad-CAM++ weights were nan for a channel with neither gradient nor activation.",
        phase="forward",
        module="explain",
        operation="div",
        line="alpha = grad.pow(2) / denominator",
        fixed="alpha = grad.pow(2) / (denominator + 1e-8)",
        cause="division",
    ),
    Cure(
        name="onset_weights",
        source="https://github.com/york135/CTC_CE_for_AST/issues/3",
        saw="The onset loss was nan for a training sample in which no frame is an onset.",
        phase="forward",
        module="onset_loss",
        operation="div",
        line="return torch.dot(losses, weights) / torch.sum(weights)",
        fixed="return torch.dot(losses, weights) / (torch.sum(weights) + 1e-8)",
        cause="division",
    ),
    Cure(
        name="pearson_constant",
        source="https://github.com/NVIDIA-Genomics-Research/AtacWorks/pull/104",
        saw="The Pearson correlation loss returned nan where a track is constant.",
        phase="forward",
        module="loss.correlation",
        operation="div",
        line="return (p * t).sum(-1) / (p.norm(dim=-1) * t.norm(dim=-1))",
        fixed="return (p * t).sum(-1) / (p.norm(dim=-1) * t.norm(dim=-1) + 1e-7)",
        cause="division",
        inferred=True,
    ),
    Cure(
        name="masked_label_mean",
        source="https://github.com/londonaicentre/FLIP/pull/766",
        saw="The loss was nan from the first batch in which every label is unannotated.",
        phase="forward",
        module="criterion",
        operation="div",
        line="return loss.sum() / mask.sum()",
        fixed="return loss.sum() / mask.sum().clamp_min(1.0)",
        cause="division",
    ),
    Cure(
        name="triplet_nonzero",
        source="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/107",
        saw="The triplet loss was nan when no triplet of the batch violates the margin.",
        phase="forward",
        module="loss",
        operation="div",
        line="return violations.sum() / (violations > 0).sum()",
        fixed="return violations.sum() / (violations > 0).sum().clamp(min=1)",
        cause="division",
    ),
    Cure(
        name="tvdiag_denominator",
        source="https://github.com/WHU-AISE/TVDiag/pull/5",
        saw="The contrastive loss was nan whenever the sum of similarities of a row was zero.",
        phase="forward",
        module="contrast",
        operation="div",
        line="loss = torch.div(sim, sim_sum)",
        fixed="loss = torch.div(sim, sim_sum + 1e-8)",
        cause="division",
    ),
    Cure(
        name="mocha_cumprod",
        source="https://github.com/j-min/MoChA-pytorch/issues/4",
        saw=(
            "Monotonic attention gave nan after some training: the running product of 1 - p "
            "underflows and is divided by."
        ),
        phase="forward",
        module="attention",
        operation="div",
        line="return p * survive * torch.cumsum(previous / survive, dim=1)",
        fixed="return p * survive * torch.cumsum(previous / survive.clamp(1e-10, 1.0), dim=1)",
        cause="division",
    ),
    Cure(
        name="variance_underflow",
        source="https://github.com/mllam/neural-lam/pull/537",
        saw=(
            "Probabilistic training crashed with nan: softplus of a very negative input is zero, and "
            "the loss divides by it."
        ),
        phase="forward",
        module="criterion",
        operation="div",
        line="std = F.softplus(raw)",
        fixed="std = F.softplus(raw).clamp(min=1e-6)",
        cause="division",
        made_at="return ((mean - target) / std).square().mean()",
    ),
    Cure(
        name="masked_division",
        source="https://github.com/pytorch/pytorch/issues/4132",
        saw=(
            "The gradient was nan for elements that were divided by zero, although they are set to "
            "zero afterwards."
        ),
        phase="backward",
        module="ratio",
        operation="div",
        line="y = x / count",
        fixed="y = x / count.masked_fill(count == 0, 1)",
        cause="division",
        inferred=True,
    ),
    Cure(
        name="rmse_exact",
        source="https://github.com/pytorch/pytorch/issues/45112",
        saw=(
            "The gradient of sqrt(mse) was nan on a batch that the model predicts exactly, and the "
            "eps in the root is the cure."
        ),
        phase="backward",
        module="criterion",
        operation="sqrt",
        line="return torch.sqrt(F.mse_loss(pred, target))",
        fixed="return torch.sqrt(F.mse_loss(pred, target) + 1e-6)",
        cause="root",
    ),
    Cure(
        name="gradient_penalty",
        source="https://github.com/keras-team/keras-io/pull/2364",
        saw=("The WGAN-GP critic got nan gradients once the gradient at an interpolated image was all zero."),
        phase="backward",
        module="penalty",
        operation="sqrt",
        line="norm = torch.sqrt(grads.square().sum(1))",
        fixed="norm = torch.sqrt(grads.square().sum(1) + 1e-7)",
        cause="root",
    ),
    Cure(
        name="lpips_normalise",
        source="https://github.com/richzhang/PerceptualSimilarity/issues/69",
        saw=("SqrtBackward returned nan: the eps stands beside the root of the feature norm and not in it."),
        phase="backward",
        module="metric.unit",
        operation="sqrt",
        line="factor = torch.sqrt(torch.sum(x**2, dim=1, keepdim=True))",
        fixed="factor = torch.sqrt(torch.sum(x**2, dim=1, keepdim=True) + self.eps)",
        cause="root",
    ),
    Cure(
        name="stoi_norm",
        source="https://github.com/mpariente/pytorch_stoi/pull/14",
        saw="Training sessions with the intelligibility loss showed nan gradients on silent frames.",
        phase="backward",
        module="intelligibility",
        operation="sqrt",
        line="norm = torch.sqrt(centred.square().sum(-1, keepdim=True))",
        fixed="norm = torch.sqrt(centred.square().sum(-1, keepdim=True) + EPS)",
        cause="root",
    ),
    Cure(
        name="spectrogram_magnitude",
        source="https://github.com/pytorch/audio/pull/1013",
        saw=(
            "A spectrogram with power 1 gave nan gradients where the signal is silent; torch's own "
            "complex abs cures it."
        ),
        phase="backward",
        module="spectrogram",
        operation="sqrt",
        line="return torch.sqrt(spec.real.pow(2) + spec.imag.pow(2))",
        fixed="return spec.abs()",
        cause="root",
    ),
    Cure(
        name="spectral_magnitude_power",
        source="https://github.com/speechbrain/speechbrain/pull/184",
        saw="The spectral magnitude with power 0.5 gave nan gradients, and none with power 1.",
        phase="backward",
        module="features.magnitude",
        operation="pow",
        line="return stft.pow(2).sum(-1).pow(self.power)",
        fixed="return (stft.pow(2).sum(-1) + 1e-14).pow(self.power)",
        cause="root",
    ),
    Cure(
        name="arcface_sine",
        source="https://github.com/ronghuaiyang/arcface-pytorch/issues/91",
        saw=(
            "The face recognition loss became nan: the root of 1 - cos² has an infinite derivative "
            "where the cosine is 1."
        ),
        phase="backward",
        module="margin",
        operation="sqrt",
        line="sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(0, 1))",
        fixed="sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))",
        cause="root",
    ),
    Cure(
        name="gaussian_distance",
        source="https://github.com/open-mmlab/mmrotate/issues/205",
        saw=(
            "The Gaussian Wasserstein distance loss had nan gradients where the predicted box equals "
            "its target."
        ),
        phase="backward",
        module="bbox_loss",
        operation="sqrt",
        line="distance = xy_distance.sqrt() + wh_distance",
        fixed="distance = xy_distance.clamp(1e-7).sqrt() + wh_distance",
        cause="root",
    ),
    Cure(
        name="graph_instance_norm",
        source="https://github.com/pyg-team/pytorch_geometric/issues/2559",
        saw=("The instance norm of a graph backpropagated nan where a feature has no variance in the graph."),
        phase="backward",
        module="norm",
        operation="sqrt",
        line="return out / (var.sqrt()[graph] + self.eps)",
        fixed="return out / (var + self.eps).sqrt()[graph]",
        cause="root",
    ),
    Cure(
        name="newton_discriminant",
        source="https://github.com/pyro-ppl/pyro/pull/1273",
        saw=(
            "A two-dimensional Newton step gave nan as rounding made the argument of the root "
            "negative; clamp and add an epsilon."
        ),
        phase="forward",
        module="step",
        operation="sqrt",
        line="root = torch.sqrt(half_trace.square() - det)",
        fixed="root = torch.sqrt((half_trace.square() - det).clamp(min=0) + 1e-10)",
        cause="root",
    ),
    Cure(
        name="beamformer_reference",
        source="https://github.com/espnet/espnet/pull/3904",
        saw=(
            "The gradient of the reference channel selection may be nan, as the amplitude of a "
            "complex value is a root of zero."
        ),
        phase="backward",
        module="reference",
        operation="sqrt",
        line="amplitude = torch.sqrt(psd.real**2 + psd.imag**2)",
        fixed="amplitude = torch.sqrt(psd.real**2 + psd.imag**2 + 1e-12)",
        cause="root",
    ),
    Cure(
        name="sobel_edges",
        source="https://github.com/chaddy1004/sobel-operator-pytorch/issues/1",
        saw=(
            "A Sobel layer without an epsilon under the root gives nan values in the backward of "
            "flat regions."
        ),
        phase="backward",
        module="edges",
        operation="sqrt",
        line="return torch.sqrt(torch.sum(gradients * gradients, dim=1, keepdim=True))",
        fixed="return torch.sqrt(torch.sum(gradients * gradients, dim=1, keepdim=True) + 1e-8)",
        cause="root",
    ),
    Cure(
        name="weight_standardisation",
        source="https://github.com/joe-siyuan-qiao/WeightStandardization/issues/16",
        saw="Weight standardization met nan; the epsilon belongs inside the root of the variance.",
        phase="backward",
        module="body.0",
        operation="sqrt",
        line="std = weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False).sqrt() + 1e-5",
        fixed="std = (weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()",
        cause="zero norm",
    ),
    Cure(
        name="contextual_attention",
        source="https://github.com/daa233/generative-inpainting-pytorch/pull/42",
        saw=(
            "Training failed a lot of times at the norm of the patches; the maximum with a small "
            "number after the root does not help."
        ),
        phase="backward",
        module="attention",
        operation="sqrt",
        line="norm = torch.max(torch.sqrt(torch.sum(wi.pow(2), dim=1, keepdim=True)), self.tiny)",
        fixed="norm = torch.sqrt(torch.sum(wi.pow(2) + self.tiny, dim=1, keepdim=True))",
        cause="untaken branch",
    ),
    Cure(
        name="quaternion_axis_angle",
        source="https://github.com/kornia/kornia/issues/3949",
        saw=(
            "quaternion_to_axis_angle has a nan gradient at the identity, although `where` selects "
            "the other branch there."
        ),
        phase="backward",
        module="to_axis_angle",
        operation="div",
        line="sin_theta = torch.sqrt(sin_squared)",
        fixed=(
            "sin_theta = torch.sqrt(torch.where(sin_squared > 0.0, sin_squared, "
            "torch.ones_like(sin_squared)))"
        ),
        cause="untaken branch",
        made_at="k_pos = two_theta / sin_theta",
    ),
    Cure(
        name="gem_pooling",
        source="https://github.com/facebookresearch/multigrain/issues/5",
        saw=(
            "The input of generalized mean pooling is clamped to an eps for stability, without which "
            "its gradients are infinite."
        ),
        phase="backward",
        module="pool",
        operation="pow",
        line="return F.avg_pool2d(x.pow(self.p), x.shape[-2:]).pow(1.0 / self.p)",
        fixed="return F.avg_pool2d(x.clamp(min=self.eps).pow(self.p), x.shape[-2:]).pow(1.0 / self.p)",
        cause="root",
    ),
    Cure(
        name="msssim_negative",
        source="https://github.com/jorge-pessoa/pytorch-msssim/issues/2",
        saw=(
            "MS-SSIM returns nan for very different images: the contrast term is negative and is "
            "taken to a fractional power."
        ),
        phase="forward",
        module="msssim",
        operation="pow",
        line="cs = torch.stack(values)",
        fixed="cs = (torch.stack(values) + 1) / 2",
        cause="root",
        made_at="return torch.prod(cs**self.weights)",
    ),
    Cure(
        name="lab_gradient",
        source="https://github.com/kornia/kornia/pull/900",
        saw=(
            "rgb_to_lab has no nan in its output and nan in its gradient, from the power of the "
            "branch that is not taken."
        ),
        phase="backward",
        module="lab",
        operation="pow",
        line="power = torch.pow(xyz, 1 / 3)",
        fixed="power = torch.pow(xyz.clamp_min(self.threshold), 1 / 3)",
        cause="untaken branch",
    ),
    Cure(
        name="l2_normalise_rsqrt",
        source="https://github.com/keras-team/keras/issues/23075",
        saw=(
            "The L2 fast path yields nan gradients for a zero vector: the minimum after rsqrt guards "
            "the value only."
        ),
        phase="backward",
        module="unit",
        operation="rsqrt",
        line="inverse = torch.rsqrt(square_sum).clamp(max=1.0 / self.eps)",
        fixed="inverse = torch.rsqrt(square_sum.clamp(min=self.eps**2))",
        cause="zero norm",
    ),
    Cure(
        name="rmse_comb_negative",
        source="https://github.com/mhpi/generic_deltamodel/pull/114",
        saw=(
            "The combined loss was nan from the first step for a network that can emit a negative "
            "flow, by sqrt(p + 1e-6)."
        ),
        phase="forward",
        module="criterion",
        operation="sqrt",
        line="p_sqrt = torch.log10(torch.sqrt(pred + self.beta) + 0.1)",
        fixed="p_sqrt = torch.log10(torch.sqrt(torch.clamp(pred, min=0.0) + self.beta) + 0.1)",
        cause="root",
    ),
    Cure(
        name="focal_gamma_half",
        source="https://github.com/kornia/kornia/issues/918",
        saw=("The binary focal loss has nan gradients for gamma between 0 and 1 when a sigmoid saturates."),
        phase="backward",
        module="criterion",
        operation="pow",
        line=(
            "positive = -self.alpha * torch.pow(1.0 - probs, self.gamma) * target * torch.log(probs "
            "+ self.eps)"
        ),
        fixed=(
            "positive = -self.alpha * torch.pow(1.0 - probs + self.eps, self.gamma) * target * "
            "torch.log(probs + self.eps)"
        ),
        cause="root",
    ),
    Cure(
        name="siamese_identical",
        source="https://github.com/adambielski/siamese-triplet/issues/18",
        saw=(
            "The derivatives of the siamese loss suddenly were nan when the batch had two identical "
            "samples in a pair."
        ),
        phase="backward",
        module="loss_fn",
        operation="sqrt",
        line="gap = F.relu(self.margin - distances.sqrt())",
        fixed="gap = F.relu(self.margin - (distances + 1e-9).sqrt())",
        cause="root",
    ),
    Cure(
        name="euclidean_similarity",
        source="https://github.com/huggingface/sentence-transformers/pull/4033",
        saw=(
            "Identical embeddings have zero distance and nan gradients; the vector-norm primitive "
            "has a finite subgradient."
        ),
        phase="backward",
        module="similarity",
        operation="sqrt",
        line="return -torch.sqrt(torch.sum(torch.square(a[:, None] - b[None]), dim=-1))",
        fixed="return -torch.linalg.vector_norm(a[:, None] - b[None], dim=-1)",
        cause="root",
    ),
    Cure(
        name="capsule_squash",
        source="https://github.com/jindongwang/Pytorch-CapsuleNet/issues/7",
        saw=(
            "The squash function has undefined gradients for a capsule of zeros, where it divides by "
            "the root of a zero norm."
        ),
        phase="backward",
        module="digits.squash",
        operation="sqrt",
        line="squared_norm = (s**2).sum(-1, keepdim=True)",
        fixed="squared_norm = (s**2 + 1e-7).sum(-1, keepdim=True)",
        cause="root",
        made_at="return torch.sqrt(squared_norm) * s / (1.0 + squared_norm)",
    ),
    Cure(
        name="rotation_to_quaternion",
        source="https://github.com/kornia/kornia/issues/1653",
        saw=(
            "rotation_matrix_to_quaternion has nan gradients for half a turn: trace + 1 is zero in "
            "the branch that is not taken."
        ),
        phase="backward",
        module="to_quaternion",
        operation="sqrt",
        line="sq = torch.sqrt(trace + 1.0) * 2.0",
        fixed="sq = torch.sqrt(trace + 1.0 + self.eps) * 2.0",
        cause="untaken branch",
    ),
    Cure(
        name="gcn_isolated",
        source="https://github.com/mlx-graphs/mlx-graphs/pull/18",
        saw="The GCN norm of an isolated node is inf, and nan after the aggregation of nothing.",
        phase="forward",
        module="conv",
        operation="pow",
        line="inv_sqrt = degree.pow(-0.5)",
        fixed="inv_sqrt = (degree + 1e-10).pow(-0.5)",
        cause="root",
    ),
    Cure(
        name="rtm3d_heatmap",
        source="https://github.com/maudzung/RTM3D/issues/13",
        saw=(
            "A nan loss during training came from log(0) in the focal loss of the heatmap; its "
            "sigmoid is clamped now."
        ),
        phase="forward",
        module="loss_heatmap",
        operation="log",
        line="prob = torch.sigmoid(logits)",
        fixed="prob = torch.sigmoid(logits).clamp(1e-4, 1 - 1e-4)",
        cause="logarithm",
        made_at="negative = torch.log(1 - prob) * prob.pow(2) * (1 - target).pow(4) * (1 - hot)",
    ),
    Cure(
        name="aggregation_cross_entropy",
        source="https://github.com/summerlvsong/Aggregation-Cross-Entropy/issues/2",
        saw=(
            "The aggregated score of a character that does not occur is zero, and its logarithm "
            "makes the loss nan."
        ),
        phase="forward",
        module="ace",
        operation="log",
        line="return -torch.sum(torch.log(aggregated) * counts) / len(probs)",
        fixed="return -torch.sum(torch.log(aggregated + 1e-10) * counts) / len(probs)",
        cause="logarithm",
    ),
    Cure(
        name="knrm_kernels",
        source="https://github.com/NTMC-Community/MatchZoo-py/pull/69",
        saw=(
            "Kernel pooling takes the log of a sum of kernels that underflows to zero; an epsilon "
            "avoids the nan."
        ),
        phase="forward",
        module="pooling",
        operation="log",
        line="return torch.log(kernels.sum(-1)).sum(-1)",
        fixed="return torch.log(kernels.sum(-1) + 1e-10).sum(-1)",
        cause="logarithm",
    ),
    Cure(
        name="msle_negative",
        source="https://github.com/dreamquark-ai/tabnet/issues/438",
        saw=(
            "The squared logarithmic error fails for negative predictions, which are clipped to 0 to "
            "avoid the error."
        ),
        phase="forward",
        module="criterion",
        operation="log",
        line="return F.mse_loss(torch.log(pred + 1), torch.log(target + 1))",
        fixed="return F.mse_loss(torch.log(pred.clamp(min=0) + 1), torch.log(target + 1))",
        cause="logarithm",
    ),
    Cure(
        name="logit_by_hand",
        source="https://github.com/pytorch/pytorch/issues/37060",
        saw=(
            "The inverse of the sigmoid by hand is inf for a probability of one; torch has a stable "
            "logit with an eps since."
        ),
        phase="forward",
        module="refine.inverse",
        operation="div",
        line="return torch.log(x / (1 - x))",
        fixed="return torch.logit(x, eps=1e-6)",
        cause="logarithm",
        inferred=True,
    ),
    Cure(
        name="sac_tanh_scale",
        source="https://github.com/cpnota/autonomous-learning-library/issues/139",
        saw=(
            "The log of 1 - action² is nan when the squashed action is scaled beyond one; it has to "
            "use the tanh before scaling."
        ),
        phase="forward",
        module="policy",
        operation="log",
        line="log_prob = log_prob - torch.log(1 - action.pow(2) + 1e-6)",
        fixed="log_prob = log_prob - torch.log(1 - torch.tanh(raw).pow(2) + 1e-6)",
        cause="logarithm",
    ),
    Cure(
        name="tanh_log_det",
        source="https://github.com/AI4Finance-Foundation/ElegantRL/issues/296",
        saw=(
            "The log-determinant of a tanh is infinite for a saturated action, unless the stable "
            "formula with softplus is used."
        ),
        phase="forward",
        module="squash",
        operation="log",
        line="return torch.log(1 - torch.tanh(x).pow(2)).sum(-1)",
        fixed="return (2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))).sum(-1)",
        cause="loss by hand",
    ),
    Cure(
        name="entropy_masked_vocabulary",
        source="https://github.com/huggingface/trl/issues/7221",
        saw="entropy_from_logits is nan for a vocabulary entry of zero probability, as 0 times -inf.",
        phase="forward",
        module="monitor",
        operation="mul",
        line="return -(torch.exp(logps) * logps).sum(-1)",
        fixed='return -(torch.exp(logps) * logps.masked_fill(logps == float("-inf"), 0.0)).sum(-1)',
        cause="mask product",
    ),
    Cure(
        name="supcon_log_zero",
        source="https://github.com/HobbitLong/SupContrast/issues/104",
        saw=(
            "The contrastive loss is nan as the sum of exponentials underflows and its log is taken; "
            "the log gets an eps."
        ),
        phase="forward",
        module="loss_fn",
        operation="log",
        line="log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))",
        fixed="log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True) + 1e-6)",
        cause="logarithm",
    ),
    Cure(
        name="log_determinant",
        source="https://github.com/cornellius-gp/gpytorch/pull/226",
        saw=(
            "The log of a determinant underflows for all but small matrices; the sum of the logs of "
            "the Cholesky diagonal does not."
        ),
        phase="forward",
        module="prior",
        operation="log",
        line="return self.eta * torch.log(torch.det(covariance))",
        fixed="return self.eta * 2 * torch.linalg.cholesky(covariance).diagonal().log().sum()",
        cause="logarithm",
    ),
    Cure(
        name="mdn_log_probs",
        source="https://github.com/tonyduan/mixture-density-network/pull/4",
        saw=(
            "The gradient of a mixture density network goes to nan; the loss must use the logits and "
            "not log(probs)."
        ),
        phase="backward",
        module="mixture",
        operation="log",
        line="log_pi = torch.log(torch.softmax(logits, dim=-1))",
        fixed="log_pi = torch.log_softmax(logits, dim=-1)",
        cause="loss by hand",
    ),
    Cure(
        name="scae_mixture",
        source="https://github.com/mlberkeley/scae-pytorch/pull/4",
        saw=(
            "The loss goes to nan after several epochs at the exp in log_prob of the mixture; "
            "logsumexp solves it."
        ),
        phase="forward",
        module="likelihood",
        operation="log",
        line="return torch.log(torch.exp(log_prob + log_mix).sum(1))",
        fixed="return torch.logsumexp(log_prob + log_mix, dim=1)",
        cause="exponential",
    ),
    Cure(
        name="lan_log_likelihood",
        source="https://github.com/lnccbrown/LANfactory/pull/103",
        saw="The logits head returns -inf for a large negative logit, where logsigmoid is finite.",
        phase="forward",
        module="head",
        operation="exp",
        line="return -torch.log(1 + torch.exp(-x))",
        fixed="return F.logsigmoid(x)",
        cause="loss by hand",
    ),
    Cure(
        name="efficientdet_focal",
        source="https://github.com/rwightman/efficientdet-pytorch/pull/77",
        saw=(
            "log1p(exp(x)) in the focal loss overflows for a large negative logit; the maintainer "
            "asks for softplus."
        ),
        phase="forward",
        module="loss_fn",
        operation="exp",
        line="ce = torch.log1p(torch.exp(neg_logits))",
        fixed="ce = F.softplus(neg_logits)",
        cause="loss by hand",
    ),
    Cure(
        name="burn_softplus",
        source="https://github.com/pytorch/pytorch/issues/17455",
        saw="log(exp(x) + 1) is inf for 100; no masking afterwards gives anything but a nan gradient.",
        phase="backward",
        module="scale",
        operation="exp",
        line="smooth = torch.log(torch.exp(x) + 1)",
        fixed="smooth = nn.functional.softplus(x)",
        cause="untaken branch",
        inferred=True,
    ),
    Cure(
        name="vgae_logstd",
        source="https://github.com/pyg-team/pytorch_geometric/issues/500",
        saw=(
            "The reparametrization of the graph autoencoder can cause nan, as the log of the "
            "deviation is not bounded."
        ),
        phase="forward",
        module="reparametrize",
        operation="exp",
        line="return mu + noise * torch.exp(logstd)",
        fixed="return mu + noise * torch.exp(logstd.clamp(max=10))",
        cause="exponential",
    ),
    Cure(
        name="vae_kl_outside",
        source="https://github.com/vanderschaarlab/synthcity/issues/331",
        saw=(
            "Unbounded log variances explode when exponentiated; clamp them to [-30, 20] as other "
            "libraries do."
        ),
        phase="forward",
        module="-",
        operation="exp",
        line="mean, logvar = output[:, :4], output[:, 4:]",
        fixed="mean, logvar = output[:, :4], output[:, 4:].clamp(-30, 20)",
        cause="exponential",
        made_at="divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp())",
    ),
    Cure(
        name="low_var_kl",
        source="https://github.com/THUDM/slime/pull/2198",
        saw=(
            "The low-variance KL estimator overflows for large finite log-ratios; the exponent is "
            "clamped to 20."
        ),
        phase="forward",
        module="kl",
        operation="exp",
        line="return torch.exp(log_ratio) - log_ratio - 1",
        fixed="return torch.exp(log_ratio.clamp(-20, 20)) - log_ratio - 1",
        cause="exponential",
    ),
    Cure(
        name="ppo_ratio",
        source="https://github.com/radixark/miles/pull/1363",
        saw=(
            "The PPO ratio overflows to inf and gives nan where the advantage is zero; the exponent "
            "is clamped."
        ),
        phase="forward",
        module="surrogate",
        operation="exp",
        line="ratio = (log_prob - old_log_prob).exp()",
        fixed="ratio = (log_prob - old_log_prob).clamp(-20.0, 20.0).exp()",
        cause="exponential",
    ),
    Cure(
        name="cox_risk_set",
        source="https://github.com/havakv/pycox/issues/144",
        saw=(
            "The sum over the risk set is a log-cumsum-exp, which by hand overflows; torch has "
            "logcumsumexp built in."
        ),
        phase="forward",
        module="cox",
        operation="exp",
        line="log_cumsum = log_hazard.exp().cumsum(0).log()",
        fixed="log_cumsum = log_hazard.logcumsumexp(0)",
        cause="exponential",
    ),
    Cure(
        name="elu_by_hand",
        source="https://github.com/pytorch/pytorch/issues/68425",
        saw=(
            "`where` gives a nan gradient for exp(x) of the branch that is not taken; multiply or "
            "clamp the input of exp."
        ),
        phase="backward",
        module="act",
        operation="exp",
        line="return torch.where(x <= 0, torch.exp(x), 1 + x)",
        fixed="return torch.where(x <= 0, torch.exp(x.clamp(max=0)), 1 + x)",
        cause="untaken branch",
    ),
    Cure(
        name="safe_cumprod",
        source="https://github.com/j-min/MoChA-pytorch/issues/2",
        saw=("The cumulative product in log space clamps its input to 1e-20 so that log(0) gives no nan."),
        phase="backward",
        module="attention",
        operation="log",
        line="logsum = torch.cumsum(torch.log(x), dim=1)",
        fixed="logsum = torch.cumsum(torch.log(torch.clamp(x, min=1e-20, max=1)), dim=1)",
        cause="exponential",
    ),
    Cure(
        name="geodesic_loss",
        source="https://github.com/papagina/RotationContinuity/issues/11",
        saw="The geodesic loss is nan until the cosine is clamped to 0.9999 in place of 1.",
        phase="backward",
        module="criterion.distance",
        operation="acos",
        line="return torch.acos(cos.clamp(-1.0, 1.0))",
        fixed="return torch.acos(cos.clamp(-0.9999, 0.9999))",
        cause="angle",
    ),
    Cure(
        name="sphere_distance",
        source="https://github.com/geoopt/geoopt/pull/79",
        saw=("AcosBackward gave nan gradients on the sphere; slightly reducing the clamp fixes the error."),
        phase="backward",
        module="sphere",
        operation="acos",
        line="inner = (x * y).sum(-1).clamp(-1, 1)",
        fixed="inner = (x * y).sum(-1).clamp(-1 + 1e-4, 1 - 1e-4)",
        cause="angle",
        made_at="return torch.acos(inner)",
    ),
    Cure(
        name="euler_pitch",
        source="https://github.com/kornia/kornia/issues/4007",
        saw=(
            "The pitch of euler_from_quaternion has a nan gradient at gimbal lock: asin is clamped "
            "to the end of its domain."
        ),
        phase="backward",
        module="euler",
        operation="asin",
        line="return torch.asin(sinp.clamp(-1.0, 1.0))",
        fixed="return torch.asin(sinp.clamp(-1.0 + 1e-6, 1.0 - 1e-6))",
        cause="angle",
    ),
    Cure(
        name="euler_asin_rounding",
        source="https://github.com/facebookresearch/momentum/pull/1630",
        saw=(
            "quaternionToXYZEuler is nan for a rotation by 90 degrees, as rounding pushes the "
            "argument of asin past one."
        ),
        phase="forward",
        module="to_euler",
        operation="asin",
        line="return torch.asin(2.0 * (w * y - z * x))",
        fixed="return torch.asin((2.0 * (w * y - z * x)).clamp(-1.0 + 1e-6, 1.0 - 1e-6))",
        cause="angle",
    ),
    Cure(
        name="phase_loss_denormal",
        source="https://github.com/csteinmetz1/auraloss/issues/49",
        saw=(
            "The phase loss had nan from torch.angle for values close to zero; small parts are "
            "replaced by a threshold."
        ),
        phase="backward",
        module="phase",
        operation="angle",
        line="return torch.angle(spec)",
        fixed="return torch.atan2(spec.imag, torch.where(spec.abs() < 1e-10, 1e-10, spec.real))",
        cause="angle",
    ),
    Cure(
        name="edge_rotation",
        source="https://github.com/facebookresearch/fairchem/pull/1574",
        saw=(
            "Fine-tuning goes to nan for edges that are aligned with the y axis, in the backward of "
            "acos; a clamp unblocks it."
        ),
        phase="backward",
        module="frame",
        operation="acos",
        line="beta = torch.acos(xyz[:, 1].clamp(-1.0, 1.0))",
        fixed="beta = torch.acos(xyz[:, 1].clamp(-1.0 + 1e-6, 1.0 - 1e-6))",
        cause="angle",
    ),
    Cure(
        name="multi_angle_margin",
        source="https://discuss.pytorch.org/t/nan-gradient-for-torch-cos-torch-acos/9617/2",
        saw=(
            "cos(acos(x)) has a nan gradient where x is 1 or -1, as the derivative of acos is infinite there."
        ),
        phase="backward",
        module="head",
        operation="acos",
        line="theta = torch.acos(cosine)",
        fixed="theta = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))",
        cause="angle",
        inferred=True,
    ),
    Cure(
        name="lorentz_arcosh",
        source="https://github.com/geoopt/geoopt/pull/215",
        saw=(
            "arcosh of the Lorentz model takes the log of a negative number for an argument below "
            "one; clamp the argument first."
        ),
        phase="forward",
        module="manifold.arcosh",
        operation="log",
        line="x = inner",
        fixed="x = torch.clamp_min(inner, 1.0 + 1e-6)",
        cause="angle",
        made_at="return torch.log(x + z)",
    ),
    Cure(
        name="poincare_artanh",
        source="https://github.com/geoopt/geoopt/pull/100",
        saw="The bounds of artanh were too loose for float32: a norm that rounds to one gives inf.",
        phase="forward",
        module="ball",
        operation="log1p",
        line="x = x.clamp(-1 + 1e-15, 1 - 1e-15)",
        fixed="x = x.clamp(-1 + 1e-7, 1 - 1e-7)",
        cause="angle",
        made_at="return 0.5 * (torch.log1p(x) - torch.log1p(-x))",
        inferred=True,
    ),
    Cure(
        name="masked_log_softmax",
        source="https://github.com/allenai/allennlp/issues/890",
        saw=(
            "masked_log_softmax returns nan for a row whose mask is all zeros, as the log of the "
            "mask is -inf everywhere."
        ),
        phase="forward",
        module="decoder",
        operation="log",
        line="return F.log_softmax(vector + mask.log(), dim=-1)",
        fixed="return F.log_softmax(vector + (mask + 1e-45).log(), dim=-1)",
        cause="masked softmax",
    ),
    Cure(
        name="causal_sign",
        source="https://github.com/lucidrains/memory-compressed-attention/issues/2",
        saw=(
            'A reader finds that the mask is filled with -float("-inf"), plus infinity, whose '
            "exponential gives nan in the softmax."
        ),
        phase="forward",
        module="attn",
        operation="masked_fill",
        line='dots = dots.masked_fill(mask, -float("-inf"))',
        fixed='dots = dots.masked_fill(mask, float("-inf"))',
        cause="masked softmax",
    ),
    Cure(
        name="softmax_row_max",
        source="https://github.com/tracel-ai/burn/pull/4697",
        saw=(
            "The attention fallback is nan for fully masked rows, where the row maximum is -inf; two "
            "clamps make it safe."
        ),
        phase="forward",
        module="attend.softmax",
        operation="sub",
        line="weights = torch.exp(scores - scores.amax(-1, keepdim=True))",
        fixed="weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e4))",
        cause="masked softmax",
    ),
    Cure(
        name="categorical_masked",
        source="https://github.com/Farama-Foundation/MicroRTS-Py/pull/32",
        saw=("Masked logits of the policy need no own entropy when the mask value is -1e8 in place of -inf."),
        phase="forward",
        module="dist",
        operation="mul",
        line='logits = torch.where(mask, logits, float("-inf"))',
        fixed="logits = torch.where(mask, logits, -1e8)",
        cause="mask product",
        made_at="return -(log_probs.exp() * log_probs).sum(-1)",
    ),
    Cure(
        name="attention_nan_refilled",
        source="https://github.com/THUwangcy/ReChorus/issues/8",
        saw=(
            "Filling the scores with -inf gives nan if the whole input is masked; the reader asks "
            "for a finite value instead."
        ),
        phase="backward",
        module="layer",
        operation="_softmax",
        line="bias = torch.zeros_like(scores).masked_fill(~mask, -torch.inf)",
        fixed="bias = torch.zeros_like(scores).masked_fill(~mask, -1e13)",
        cause="masked softmax",
        made_at="weights = torch.softmax(scores + bias, dim=-1)",
    ),
    Cure(
        name="kl_masked_tokens",
        source="https://github.com/NovaSky-AI/SkyRL/pull/1635",
        saw=(
            "A nan at masked positions leaks through the product with the loss mask into the policy "
            "loss; the position is filled."
        ),
        phase="forward",
        module="kl",
        operation="mul",
        line="kld = kld * loss_mask",
        fixed="kld = kld.masked_fill(~loss_mask.bool(), 0.0)",
        cause="mask product",
    ),
    Cure(
        name="weather_missing_tokens",
        source="https://github.com/ecmwf/WeatherGenerator/pull/2717",
        saw=(
            "A non-finite value at an excluded token poisoned the whole loss, as its product with 0 "
            "is nan; `where` selects."
        ),
        phase="forward",
        module="ssl_loss",
        operation="mul",
        line="masked = per_token * mask",
        fixed="masked = torch.where(mask.bool(), per_token, 0.0)",
        cause="mask product",
    ),
    Cure(
        name="mse_missing_targets",
        source="https://github.com/pytorch/pytorch/issues/121416",
        saw=(
            "Selecting the valid elements after MSELoss gives a nan gradient; selecting before it "
            "gives the expected one."
        ),
        phase="backward",
        module="objective.criterion",
        operation="mse_loss",
        line="return self.criterion(pred, target)[valid].sum()",
        fixed="return self.criterion(pred[valid], target[valid]).sum()",
        cause="mask product",
    ),
    Cure(
        name="group_std_single",
        source="https://github.com/pytorch/pytorch/issues/29372",
        saw=(
            "torch.std of a single item is nan by the default of an unbiased estimate; "
            "unbiased=False gives 0."
        ),
        phase="forward",
        module="advantage",
        operation="std",
        line="std = grouped.std(dim=1, keepdim=True)",
        fixed="std = grouped.std(dim=1, keepdim=True, unbiased=False)",
        cause="one element",
    ),
    Cure(
        name="cross_entropy_empty",
        source="https://github.com/pytorch/pytorch/issues/50224",
        saw=(
            'cross_entropy with empty inputs and the reduction "mean" is nan; the reduction "sum" is '
            "reasonable."
        ),
        phase="forward",
        module="head.classify_loss",
        operation="nll_loss_forward",
        line="return F.cross_entropy(logits[keep], labels[keep])",
        fixed=(
            'return F.cross_entropy(logits[keep], labels[keep], reduction="sum") / keep.sum().clamp(min=1)'
        ),
        cause="empty mean",
        inferred=True,
    ),
    Cure(
        name="finger_contact_mean",
        source="https://github.com/anindita127/IMoS/issues/9",
        saw=(
            "The finger loss is nan for some sequences: torch.mean over an empty tensor, as no frame "
            "is in contact."
        ),
        phase="forward",
        module="contact",
        operation="mean",
        line="return distance[flag].mean()",
        fixed="return distance[flag].sum() / flag.sum().clamp(min=1)",
        cause="empty mean",
        inferred=True,
    ),
    Cure(
        name="eigenvectors_repeated",
        source="https://github.com/pytorch/pytorch/issues/23133",
        saw=(
            "symeig gives nan gradients when eigenvalues repeat; distinct small values on the "
            "diagonal separate them."
        ),
        phase="backward",
        module="basis",
        operation="linalg_eigh",
        line="_, vectors = torch.linalg.eigh(covariance)",
        fixed=(
            "_, vectors = torch.linalg.eigh(covariance + torch.diag(torch.linspace(0.0, 1e-2, "
            "len(covariance))))"
        ),
        cause="decomposition",
    ),
    Cure(
        name="pseudo_inverse",
        source="https://github.com/pytorch/pytorch/issues/110009",
        saw=(
            "A pseudo-inverse by svd and torch.linalg.pinv differ in their gradients, which for U "
            "and V of close values are unstable."
        ),
        phase="backward",
        module="solve",
        operation="linalg_svd",
        line="inverse = vh.T @ torch.diag(1 / s) @ u.T",
        fixed="inverse = torch.linalg.pinv(design)",
        cause="decomposition",
        made_at="u, s, vh = torch.linalg.svd(design, full_matrices=False)",
    ),
    Cure(
        name="svd_rank_deficient",
        source="https://github.com/pytorch/pytorch/issues/49886",
        saw=(
            "All matrices with several zero singular values cannot be differentiated through U and V "
            "of an SVD."
        ),
        phase="backward",
        module="lowrank",
        operation="linalg_svd",
        line="u, s, vh = torch.linalg.svd(features, full_matrices=False)",
        fixed=(
            "u, s, vh = torch.linalg.svd(features + 1e-2 * "
            "torch.eye(*features.shape[-2:]).cumsum(-1), full_matrices=False)"
        ),
        cause="decomposition",
        inferred=True,
    ),
    Cure(
        name="dora_weight_norm",
        source="https://github.com/KohakuBlueleaf/LyCORIS/pull/166",
        saw=(
            "The weight decomposition of the adapter divides by a weight norm of zero, and training "
            "has nan weights."
        ),
        phase="forward",
        module="adapter",
        operation="div",
        line="return weight * (self.magnitude / weight_norm)",
        fixed="return weight * (self.magnitude / (weight_norm + torch.finfo(weight.dtype).eps))",
        cause="zero norm",
    ),
    Cure(
        name="spectral_norm_zero",
        source="https://github.com/pytorch/pytorch/issues/20192",
        saw=(
            "spectral_norm of a weight of zeros gives nan: the eps serves the vectors of the "
            "iteration and not sigma."
        ),
        phase="forward",
        module="discriminate.out",
        operation="div",
        line="return F.linear(x, self.weight / sigma, self.bias)",
        fixed="return F.linear(x, self.weight / (sigma + self.eps), self.bias)",
        cause="zero norm",
        inferred=True,
    ),
    Cure(
        name="where_shifted_ratio",
        source="https://github.com/pytorch/pytorch/issues/36923",
        saw=(
            "Backprop through `where` passes the nan of t * (x / t) on, a path that is never taken for t = 0."
        ),
        phase="backward",
        module="blend",
        operation="div",
        line="below = t * (x / t)",
        fixed="below = t * (x / torch.where(t == 0, torch.ones_like(t), t))",
        cause="untaken branch",
        inferred=True,
    ),
    Cure(
        name="where_sqrt_negative",
        source="https://github.com/tensorflow/tensorflow/pull/38467",
        saw=(
            "where(y > 0, sqrt(y), y) has a nan gradient for negative y; the reviewer writes "
            "sqrt(where(y > 0, y, 1))."
        ),
        phase="backward",
        module="companding",
        operation="sqrt",
        line="return torch.where(x > 0, torch.sqrt(x), x)",
        fixed="return torch.where(x > 0, torch.sqrt(torch.where(x > 0, x, 1.0)), x)",
        cause="untaken branch",
    ),
    Cure(
        name="where_log2",
        source="https://github.com/pytorch/pytorch/issues/108618",
        saw="The gradient is nan at x = 0, where the formula 2x is chosen and log2(x) filtered out.",
        phase="backward",
        module="level",
        operation="log2",
        line="coarse = torch.log2(x)",
        fixed="coarse = torch.log2(torch.where(x > 2, x, torch.ones_like(x)))",
        cause="untaken branch",
        inferred=True,
    ),
    Cure(
        name="nfw_profile",
        source="https://github.com/Ciela-Institute/caustics/pull/83",
        saw=(
            "The NFW lens has nan gradients, as torch.where does not protect from the nan of the "
            "branch that is off."
        ),
        phase="backward",
        module="lens.profile",
        operation="atanh",
        line="inner = torch.atanh(torch.sqrt((1 - x) / (1 + x)))",
        fixed="inner = torch.atanh(torch.sqrt((1 - x.clamp(max=0.999)) / (1 + x.clamp(max=0.999))))",
        cause="untaken branch",
        inferred=True,
    ),
    Cure(
        name="where_norm_then_select",
        source="https://github.com/jax-ml/jax/issues/347",
        saw=(
            "The root of a row of zeros gives a nan gradient though `where` takes a one in its "
            "place; where then root succeeds."
        ),
        phase="backward",
        module="clip",
        operation="sqrt",
        line="length = torch.where(square > 0.25, torch.sqrt(square), torch.ones_like(square))",
        fixed="length = torch.sqrt(torch.where(square > 0.25, square, torch.ones_like(square)))",
        cause="untaken branch",
    ),
    Cure(
        name="half_normalise_quaternion",
        source="https://github.com/kornia/kornia/issues/4021",
        saw=(
            "normalize_quaternion returns nan in float16 for the zero quaternion: its eps of 1e-12 "
            "underflows to 0."
        ),
        phase="forward",
        module="pose.normalise",
        operation="div",
        line="eps = 1.0e-12",
        fixed="eps = 1.0e-4",
        cause="half eps",
        made_at="return q / q.norm(dim=-1, keepdim=True).clamp_min(self.eps)",
    ),
    Cure(
        name="half_saturation",
        source="https://github.com/kornia/kornia/issues/4560",
        saw=(
            "rgb_to_hsv returns a nan saturation for black pixels in float16, as an eps of 1e-8 "
            "rounds to zero."
        ),
        phase="forward",
        module="augment.hsv",
        operation="div",
        line="def __init__(self, eps: float = 1e-8) -> None:",
        fixed="def __init__(self, eps: float = 1e-4) -> None:",
        cause="half eps",
        made_at="return delta / (max_rgb + self.eps)",
    ),
    Cure(
        name="half_box_coder",
        source="https://github.com/rwightman/efficientdet-pytorch/issues/291",
        saw=(
            "The box coder guards its log with an EPS of 1e-8, which is zero in float16; with 1e-7 "
            "training is stable."
        ),
        phase="forward",
        module="coder",
        operation="log",
        line="EPS = 1e-8",
        fixed="EPS = 1e-7",
        cause="half eps",
        made_at="return torch.log(sizes) - torch.log(anchors)",
    ),
    Cure(
        name="half_normalize_default",
        source="https://github.com/pytorch/pytorch/pull/33596",
        saw=(
            "torch.nn.functional.normalize with its eps of 1e-12 is nan in half precision for a zero "
            "norm; 1e-4 works."
        ),
        phase="forward",
        module="attention",
        operation="div",
        line="return F.normalize(x, dim=-1)",
        fixed="return F.normalize(x, dim=-1, eps=1e-4)",
        cause="half eps",
    ),
    Cure(
        name="half_recon_loss",
        source="https://github.com/pyg-team/pytorch_geometric/pull/2106",
        saw=(
            "The EPS of 1e-15 of the graph autoencoder gives inf in half precision; it has to follow "
            "the precision."
        ),
        phase="forward",
        module="gae",
        operation="log",
        line="EPS = 1e-15",
        fixed="EPS = 1e-4",
        cause="half eps",
        made_at="neg_loss = -torch.log(1 - self.decoder(z, negative) + EPS).mean()",
    ),
    Cure(
        name="focal_clamp_rounds",
        source="https://github.com/NVIDIA/apex/issues/358",
        saw=(
            "The clamp to 1 - 1e-8 rounds to one even in float32, and the focal loss is nan; the eps "
            "belongs in the log."
        ),
        phase="forward",
        module="criterion",
        operation="log",
        line="negative = (1 - target) * probs.pow(self.gamma) * torch.log(1 - probs)",
        fixed="negative = (1 - target) * probs.pow(self.gamma) * torch.log(1 - probs + eps)",
        cause="half eps",
    ),
    Cure(
        name="half_scan_log",
        source="https://github.com/lucidrains/gateloop-transformer/pull/4",
        saw="The scan in log space clamps to 1e-8, which is 0.0 in fp16.",
        phase="forward",
        module="scan",
        operation="log",
        line="return torch.log(t.clamp(min=1e-8))",
        fixed="return torch.log(t.clamp(min=1e-6))",
        cause="half eps",
    ),
    Cure(
        name="half_rotation_log",
        source="https://github.com/kornia/kornia/issues/3966",
        saw=(
            "quaternion_exp_to_log is nan in float16 for the identity: the default eps of 1e-8 "
            "underflows to zero."
        ),
        phase="backward",
        module="log_map",
        operation="div",
        line="scale = torch.where(norm > 0, norm, self.eps)",
        fixed="scale = torch.where(norm > 0, norm, 1e-4)",
        cause="half eps",
        made_at="angle = vector / scale",
    ),
    Cure(
        name="distil_kl",
        source="https://github.com/pytorch/pytorch/pull/34586",
        saw=(
            "kl_div accepts its target in log space, so that neither distribution goes through a "
            "probability of zero."
        ),
        phase="forward",
        module="distil",
        operation="log",
        line="return (p * (p.log() - q.log())).sum(-1).mean()",
        fixed=(
            "return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), "
            'reduction="batchmean", log_target=True)'
        ),
        cause="loss by hand",
    ),
    Cure(
        name="anchor_negative",
        source="https://github.com/slryou41/AnchorLoss/issues/2",
        saw=(
            "A logarithm on top of the sigmoid sometimes generated nan; the author recommends F.logsigmoid."
        ),
        phase="forward",
        module="loss_fn",
        operation="log",
        line="logpt_neg = torch.log(1 - torch.sigmoid(logits))",
        fixed="logpt_neg = F.logsigmoid(-logits)",
        cause="loss by hand",
    ),
    Cure(
        name="gptq_zero_scale",
        source="https://github.com/ModelCloud/GPTQModel/pull/1531",
        saw=(
            "Quantisation divides by a scale that was calculated as 0, and nan follows; the scale "
            "gets a floor of 1e-8."
        ),
        phase="forward",
        module="layer.quantise",
        operation="div",
        line="scale = (high - low) / self.maxq",
        fixed="scale = ((high - low) / self.maxq).clamp(min=1e-8)",
        cause="quantisation",
        made_at="q = (w - low) / scale",
    ),
    Cure(
        name="lsq_scale",
        source="https://github.com/zhutmost/lsq-net/issues/17",
        saw=(
            "The learned step of the quantiser can become 0, the division gives nan, and an eps "
            "should be used."
        ),
        phase="forward",
        module="act_quant",
        operation="div",
        line="x = x / s",
        fixed="x = x / (s + 1e-8)",
        cause="quantisation",
    ),
    Cure(
        name="omniquant_clipmin",
        source="https://github.com/OpenGVLab/OmniQuant/pull/33",
        saw="A scale without its minimum causes nan; the clamped scale must be the one that is used.",
        phase="forward",
        module="quantizer",
        operation="div",
        line="self.scale = scale",
        fixed="self.scale = scale.clamp(min=CLIPMIN)",
        cause="quantisation",
        made_at="q = w / self.scale",
    ),
    Cure(
        name="inverse_scale",
        source="https://github.com/intel/auto-round/issues/622",
        saw=("The inverse scale is guarded at exactly zero, but a scale can be 1e-40, whose inverse is inf."),
        phase="forward",
        module="rounding",
        operation="reciprocal",
        line="inverse_scale = torch.where(scale == 0, 0.0, 1 / scale)",
        fixed="inverse_scale = torch.where(scale < 1e-30, 0.0, 1 / scale.clamp(min=1e-30))",
        cause="quantisation",
        inferred=True,
    ),
    Cure(
        name="float8_scale",
        source="https://github.com/vipshop/cache-dit/pull/1097",
        saw="A zero scale of the float8 cast gives 0/0; the scales are clamped.",
        phase="backward",
        module="cast",
        operation="div",
        line="scale = amax / 448.0",
        fixed="scale = amax.clamp(min=1e-12) / 448.0",
        cause="quantisation",
        made_at="rounded = (x / scale).clamp(-448, 448)",
        inferred=True,
    ),
    Cure(
        name="learning_rate_quality",
        source="https://github.com/pavancm/CONTRIQUE/issues/8",
        saw=(
            "A nan loss occurred in the second epoch, and the author's cure was to reduce the learning rate."
        ),
        phase="forward",
        module="head",
        operation="addmm",
        line="return torch.optim.SGD(model.parameters(), lr=3.0)",
        fixed="return torch.optim.SGD(model.parameters(), lr=0.01)",
        cause="growth",
        made_at="return self.head(torch.relu(self.features(x))).squeeze(-1)",
        steps=5,
    ),
    Cure(
        name="rnn_relu_rate",
        source="https://github.com/pytorch/examples/pull/223",
        saw=(
            "RNN_RELU with the default learning rate of 20 produces nan losses immediately; 1 or 2 "
            "allows it to learn."
        ),
        phase="forward",
        module="rnn",
        operation="addmm",
        line='parser = {"lr": 20.0, "nhid": 12}',
        fixed='parser = {"lr": 0.2, "nhid": 12}',
        cause="growth",
        made_at="h, _ = self.rnn(self.encoder(text))",
        steps=9,
    ),
    Cure(
        name="static_loss_scale",
        source="https://github.com/open-mmlab/mmdetection/issues/3690",
        saw="The fixed loss scale of 512 for fp16 training sometimes makes the gradients overflow.",
        phase="backward",
        module="reg",
        operation="addmm",
        line="LOSS_SCALE = 512.0",
        fixed="LOSS_SCALE = 1.0",
        cause="growth",
        made_at="return self.reg(torch.relu(self.neck(features)))",
    ),
    Cure(
        name="grad_scaler_growth",
        source="https://github.com/pytorch/pytorch/issues/98828",
        saw=(
            "For a small loss the scale doubles until it overflows before a gradient does; capping "
            "its growth cures it."
        ),
        phase="forward",
        module="-",
        operation="mul",
        line="self.scale *= 2.0",
        fixed="self.scale = min(self.scale * 2.0, 2.0**24)",
        cause="growth",
        made_at="scaled = value * self.scale",
        steps=113,
    ),
    Cure(
        name="constant_image",
        source="https://github.com/vanvalenlab/deepcell-toolbox/pull/72",
        saw=(
            "The normalisation of an image divides by its standard deviation, which is 0 for a "
            "constant one; epsilon prevents it."
        ),
        phase="forward",
        module="normalise",
        operation="div",
        line="return (image - mean) / std",
        fixed="return (image - mean) / (std + 1e-7)",
        cause="one sample",
    ),
    Cure(
        name="identity_mask",
        source="https://github.com/Zhen-Dong/Magic-Me/issues/14",
        saw="The loss is nan if the mask of one clip sums to zero.",
        phase="forward",
        module="identity_loss",
        operation="div",
        line="per_clip = loss.flatten(1).sum(1) / masks.flatten(1).sum(1)",
        fixed="per_clip = loss.flatten(1).sum(1) / (masks.flatten(1).sum(1) + 1e-6)",
        cause="one sample",
    ),
    Cure(
        name="volume_intensity",
        source="https://github.com/Project-MONAI/MONAI/issues/1092",
        saw=(
            "NormalizeIntensity divides by the std of the voxels, which can be 0; then only the mean "
            "is subtracted."
        ),
        phase="forward",
        module="transform",
        operation="div",
        line="scale = volume.flatten(1).std(1, unbiased=False)",
        fixed=(
            "scale = volume.flatten(1).std(1, unbiased=False).where(volume.flatten(1).std(1) > 1e-8, 1.0)"
        ),
        cause="one sample",
        made_at="return (volume - shift[:, None, None, None, None]) / scale[:, None, None, None, None]",
    ),
    Cure(
        name="masking_threshold_psd",
        source="https://github.com/Trusted-AI/adversarial-robustness-toolbox/issues/1658",
        saw=(
            "The psychoacoustic loss is nan after several iterations: a root in the power density is "
            "redundant, as it is squared."
        ),
        phase="backward",
        module="psd",
        operation="sqrt",
        line="power = torch.sqrt(spec.real**2 + spec.imag**2).square()",
        fixed="power = spec.real**2 + spec.imag**2",
        cause="root",
    ),
    Cure(
        name="nnaudio_magnitude",
        source="https://github.com/KinWaiCheuk/nnAudio/issues/138",
        saw=(
            "The magnitude output of the STFT layer gives nan gradients where the spectrum is 0, "
            "unless 1e-8 is added."
        ),
        phase="backward",
        module="features",
        operation="sqrt",
        line="return torch.sqrt(spec)",
        fixed="return torch.sqrt(spec + 1e-8)",
        cause="root",
    ),
    Cure(
        name="stft_magnitude_clamp",
        source="https://github.com/csteinmetz1/auraloss/pull/12",
        saw=(
            "The magnitude of the STFT was instable for small values; the power is clamped before the root."
        ),
        phase="backward",
        module="stft_loss.stft",
        operation="sqrt",
        line="return torch.sqrt(x.real.square() + x.imag.square())",
        fixed="return torch.sqrt(torch.clamp(x.real.square() + x.imag.square(), min=1e-8))",
        cause="root",
    ),
    Cure(
        name="spectral_rmse",
        source="https://github.com/ZFTurbo/Music-Source-Separation-Training/pull/200",
        saw=(
            "The spectral rmse loss was going nan in the separation training; adding an eps makes it "
            "more stable."
        ),
        phase="backward",
        module="-",
        operation="sqrt",
        line="rmse = torch.sqrt(error.abs().square().mean((-2, -1)))",
        fixed="rmse = torch.sqrt(error.abs().square().mean((-2, -1)) + 1e-8)",
        cause="root",
    ),
    Cure(
        name="complex_head_angle",
        source="https://github.com/pytorch/pytorch/issues/98276",
        saw=(
            "torch.angle has a nan gradient for inputs close to (0, 0), where atan2 of the two parts "
            "has a correct one."
        ),
        phase="backward",
        module="demodulate",
        operation="angle",
        line="return torch.angle(symbol)",
        fixed="return torch.atan2(symbol.imag, symbol.real)",
        cause="angle",
    ),
    Cure(
        name="cosine_cutoff",
        source="https://github.com/pytorch/pytorch/issues/18287",
        saw=(
            "The gradient of where(x < 1, cos(x), 0) is nan where x is infinite, though its value is "
            "not used there."
        ),
        phase="backward",
        module="descriptor.cutoff",
        operation="cos",
        line="return torch.where(x < 1.0, 0.5 * torch.cos(torch.pi * x) + 0.5, torch.zeros_like(x))",
        fixed=(
            "return torch.where(x < 1.0, 0.5 * torch.cos(torch.pi * torch.where(x < 1.0, x, 0.0)) + "
            "0.5, torch.zeros_like(x))"
        ),
        cause="untaken branch",
        inferred=True,
    ),
    Cure(
        name="capped_exponential",
        source="https://github.com/pytorch/pytorch/issues/156212",
        saw=(
            "An exponential that `where` caps for large inputs still has a nan gradient from the "
            "branch that was not selected."
        ),
        phase="backward",
        module="rate",
        operation="exp",
        line="return torch.where(x <= self.cap, torch.exp(x), self.limit)",
        fixed="return torch.where(x <= self.cap, torch.exp(x.clamp(max=self.cap)), self.limit)",
        cause="untaken branch",
        inferred=True,
    ),
    Cure(
        name="power_three_halves",
        source="https://github.com/tinygrad/tinygrad/issues/12409",
        saw="where(x == 0, 0, x * sqrt(x)) has a nan gradient at 0; written as x ** 1.5 it is 0.",
        phase="backward",
        module="drag",
        operation="sqrt",
        line="return torch.where(x == 0, 0.0, x * x.sqrt())",
        fixed="return x**1.5",
        cause="untaken branch",
    ),
    Cure(
        name="rms_norm_outside",
        source="https://github.com/tile-ai/tilelang/pull/1243",
        saw=(
            "The epsilon of an RMS norm belongs inside the root as PyTorch defines it; its place was "
            "adjusted for stability."
        ),
        phase="backward",
        module="blocks.0.norm",
        operation="sqrt",
        line="rms = x.square().mean(-1, keepdim=True).sqrt() + self.eps",
        fixed="rms = (x.square().mean(-1, keepdim=True) + self.eps).sqrt()",
        cause="zero norm",
    ),
    Cure(
        name="half_quaternion_gradient",
        source="https://github.com/kornia/kornia/issues/4623",
        saw=(
            "In float16 the gradient of a guarded normalisation is nan, as the eps flushes to zero; "
            "a safe norm is substituted."
        ),
        phase="backward",
        module="normalise",
        operation="div",
        line="unit = q / norm.clamp(min=self.eps)",
        fixed="unit = q / torch.where(norm > 0, norm, torch.ones_like(norm))",
        cause="half eps",
    ),
    Cure(
        name="rotation_asin_distance",
        source="https://github.com/eigenvivek/nanodrr/pull/31",
        saw=(
            "The geodesic distance of two poses has infinite gradients half a turn apart; the input "
            "of asin is clamped."
        ),
        phase="backward",
        module="pose_loss",
        operation="asin",
        line="angle = 2.0 * torch.asin(chord.clamp(max=1.0))",
        fixed="angle = 2.0 * torch.asin(chord.clamp(max=1.0 - 1e-6))",
        cause="angle",
        inferred=True,
    ),
    Cure(
        name="symmetric_eigenvalues",
        source="https://github.com/banctilrobitaille/torch-vectorized/issues/7",
        saw=(
            "AcosBackward returned nan for symmetric matrices; the author clamps the input to [-1 + "
            "eps, 1 - eps]."
        ),
        phase="backward",
        module="eigenvalues",
        operation="acos",
        line="phi = torch.acos(r.clamp(-1.0, 1.0)) / 3.0",
        fixed="phi = torch.acos(r.clamp(-1.0 + 1e-6, 1.0 - 1e-6)) / 3.0",
        cause="angle",
    ),
    Cure(
        name="fractional_norm",
        source="https://github.com/pytorch/pytorch/issues/44452",
        saw=(
            "A norm with an exponent below one cannot be backpropagated, as the gradients of values "
            "that are zero are nan."
        ),
        phase="backward",
        module="sparsity",
        operation="pow",
        line="return x.abs().pow(self.p).sum(-1)",
        fixed="return (x.abs() + 1e-6).pow(self.p).sum(-1)",
        cause="root",
        inferred=True,
    ),
    Cure(
        name="annotator_spread",
        source="https://github.com/ZhouCX117/UAED_MuGE/issues/50",
        saw="The std during training is always nan for a dataset that has one annotation per image.",
        phase="forward",
        module="uncertainty",
        operation="std",
        line="return labels.std(dim=1)",
        fixed="return labels.std(dim=1, unbiased=False)",
        cause="one element",
        inferred=True,
    ),
    Cure(
        name="instance_variance",
        source="https://github.com/pytorch/pytorch/pull/51953",
        saw=(
            "The variance over a dimension of one element is nan, which reaches instance "
            "normalisation; numpy's estimate is 0."
        ),
        phase="forward",
        module="down.norm",
        operation="var",
        line="var = x.var(dim=2, keepdim=True)",
        fixed="var = x.var(dim=2, keepdim=True, unbiased=False)",
        cause="one element",
    ),
    Cure(
        name="l1_no_positive",
        source="https://github.com/open-mmlab/mmdetection/pull/5976",
        saw=(
            "The L1 loss of the regression is not a number when an image has no positive sample; it "
            "returns 0 since."
        ),
        phase="forward",
        module="bbox_head.loss_l1",
        operation="mean",
        line="return (pred - target).abs().mean()",
        fixed="return (pred - target).abs().mean() if target.numel() else pred.sum() * 0",
        cause="empty mean",
    ),
    Cure(
        name="mask_attention_empty",
        source="https://github.com/Deci-AI/super-gradients/pull/982",
        saw="The mask attention loss returns nan values when the mask is empty.",
        phase="forward",
        module="criterion",
        operation="mean",
        line="mask_loss = losses[mask].mean()",
        fixed="mask_loss = losses[mask].sum() / mask.sum().clamp(min=1)",
        cause="empty mean",
        inferred=True,
    ),
    Cure(
        name="label_entropy",
        source="https://github.com/pyro-ppl/numpyro/pull/2276",
        saw=(
            "The entropy of a categorical is nan when a probability is exactly zero; the term is "
            "written with xlogy."
        ),
        phase="forward",
        module="router.weigh",
        operation="log",
        line="return -(probs * torch.log(probs)).sum(-1)",
        fixed="return -torch.special.xlogy(probs, probs).sum(-1)",
        cause="logarithm",
    ),
    Cure(
        name="normuon_ratio",
        source="https://github.com/microsoft/dion/pull/24",
        saw=(
            "The ratio of two norms is 0/0 for weights whose gradient is zero; the denominator is "
            "clamped to 1e-8."
        ),
        phase="forward",
        module="update",
        operation="div",
        line="ratio = norm / norm_new",
        fixed="ratio = norm / norm_new.clamp(min=1e-8)",
        cause="zero norm",
    ),
    Cure(
        name="clip_by_norm_zero",
        source="https://github.com/PaddlePaddle/Paddle/pull/32038",
        saw="The output of clip_by_norm is inf or nan if all of its input values are zero.",
        phase="forward",
        module="clip",
        operation="reciprocal",
        line="scale = self.limit / norm",
        fixed="scale = self.limit / norm.clamp(min=1e-6)",
        cause="zero norm",
        inferred=True,
    ),
    Cure(
        name="ctc_short_input",
        source="https://github.com/wenet-e2e/wenet/pull/2299",
        saw="The CTC loss was inf for utterances with fewer frames than their transcript needs.",
        phase="forward",
        module="ctc.ctc_loss",
        operation="_ctc_loss",
        line='self.ctc_loss = nn.CTCLoss(blank=0, reduction="sum")',
        fixed='self.ctc_loss = nn.CTCLoss(blank=0, reduction="sum", zero_infinity=True)',
        cause="option",
        made_at="return self.ctc_loss(log_probs, text, frames, lengths) / encoded.shape[0]",
    ),
    Cure(
        name="sft_all_ignored",
        source="https://github.com/nvidia-cosmos/cosmos-rl/pull/155",
        saw="The loss of fine-tuning was nan for a batch in which every label is ignored.",
        phase="forward",
        module="criterion",
        operation="nll_loss_forward",
        line="return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)",
        fixed=(
            "return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)"
            " if (labels != -100).any() else logits.sum() * 0.0"
        ),
        cause="empty mean",
    ),
    Cure(
        name="label_token_count",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/3796",
        saw="The loss was divided by a number of label tokens that was 0 for a batch without any.",
        phase="forward",
        module="loss",
        operation="div",
        line="return total / num_label_tokens",
        fixed="return total / max(num_label_tokens, 1)",
        cause="division",
    ),
    Cure(
        name="attention_all_padding",
        source="https://github.com/pytorch/pytorch/issues/41508",
        saw="Attention was nan where the padding mask covers all keys of a sample.",
        phase="forward",
        module="block.attend",
        operation="_softmax",
        line="mixed, _ = self.attend(x, x, x, key_padding_mask=padding)",
        fixed="mixed, _ = self.attend(x, x, x, key_padding_mask=padding & ~padding.all(-1, keepdim=True))",
        cause="masked softmax",
    ),
    Cure(
        name="logit_saturated",
        source="https://github.com/salzberg-lab/Balrog/issues/7",
        saw="The mean of logits was inf as soon as one probability was exactly 1.",
        phase="backward",
        module="combine",
        operation="logit",
        line="return torch.sigmoid(torch.logit(probabilities).mean(-1))",
        fixed="return torch.sigmoid(torch.logit(probabilities, eps=1e-6).mean(-1))",
        cause="logarithm",
    ),
    Cure(
        name="log_cosh_residual",
        source="https://github.com/Lightning-AI/torchmetrics/issues/3488",
        saw="The log-cosh error was inf for a residual of 100, though its value is about 99.",
        phase="forward",
        module="error",
        operation="cosh",
        line="return torch.log(torch.cosh(residual)).mean()",
        fixed="return (residual + nn.functional.softplus(-2.0 * residual) - 0.6931471805599453).mean()",
        cause="exponential",
    ),
    Cure(
        name="gumbel_zero",
        source="https://github.com/HKUDS/SSLRec/issues/26",
        saw="The Gumbel noise was -inf where the uniform sample was exactly 0.",
        phase="forward",
        module="perturb",
        operation="log",
        line="noise = -torch.log(-torch.log(uniform))",
        fixed="noise = -torch.log(-torch.log(uniform.clamp(min=1e-8)))",
        cause="logarithm",
    ),
    Cure(
        name="layer_norm_no_eps",
        source="https://github.com/tensorflow/tensorflow/issues/61287",
        saw="Layer normalisation with an epsilon of 0 was nan for a row of zeros.",
        phase="forward",
        module="block.norm",
        operation="native_layer_norm",
        line="self.norm = nn.LayerNorm(width, eps=0.0)",
        fixed="self.norm = nn.LayerNorm(width, eps=1e-5)",
        cause="option",
        made_at="return self.mix(self.norm(x))",
    ),
    Cure(
        name="seismic_in_place",
        source="https://github.com/crimeacs/seismic-augmentation/pull/5",
        saw="Traces of a silent station were nan after they had been divided by their largest value.",
        phase="forward",
        module="standardise",
        operation="div",
        line="return centred.div_(centred.abs().amax(-1, keepdim=True))",
        fixed="return centred.div_(centred.abs().amax(-1, keepdim=True) + 1e-8)",
        cause="division",
    ),
    Cure(
        name="poisson_negative_rate",
        source="https://github.com/pytorch/pytorch/issues/184030",
        saw="The Poisson loss without log_input was nan for negative rates.",
        phase="forward",
        module="objective",
        operation="log",
        line="return F.poisson_nll_loss(rate, spikes, log_input=False)",
        fixed="return F.poisson_nll_loss(rate.clamp(min=0), spikes, log_input=False)",
        cause="logarithm",
    ),
    Cure(
        name="sampling_temperature",
        source="https://github.com/suno-ai/bark/issues/270",
        saw="The probabilities were nan for a temperature of 0.",
        phase="forward",
        module="sample",
        operation="div",
        line="return F.softmax(logits / temperature, dim=-1)",
        fixed="return F.softmax(logits / (temperature + 1e-9), dim=-1)",
        cause="division",
    ),
    Cure(
        name="truncated_normal_edge",
        source="https://github.com/jax-ml/jax/pull/4548",
        saw="A sample of a truncated normal was -inf where the uniform sample was at the edge.",
        phase="forward",
        module="sample",
        operation="erfinv",
        line="return mean + 2**0.5 * torch.erfinv(2 * uniform - 1)",
        fixed="return mean + 2**0.5 * torch.erfinv((2 * uniform - 1).clamp(-1 + 1e-6, 1 - 1e-6))",
        cause="angle",
    ),
    Cure(
        name="siou_angle",
        source="https://github.com/meituan/YOLOv6/issues/417",
        saw="The SIoU box loss became nan after some hundred epochs, for a box at the centre of its target.",
        phase="forward",
        module="loss_box",
        operation="div",
        line="sigma = torch.pow(apart[:, 0] ** 2 + apart[:, 1] ** 2, 0.5)",
        fixed="sigma = torch.pow(apart[:, 0] ** 2 + apart[:, 1] ** 2 + 1e-7, 0.5)",
        cause="division",
        made_at="sine = apart[:, 0] / sigma",
        inferred=True,
    ),
    Cure(
        name="crf_probability",
        source="https://github.com/allanj/pytorch_neural_crf/issues/4",
        saw="The logarithm of the exponentiated score was infinite, where the score itself is not.",
        phase="forward",
        module="chain",
        operation="log",
        line="return -torch.log(p)",
        fixed="return total - labelled",
        cause="logarithm",
    ),
]

# A model of each family of cures.
FAMILIES = {
    "division": "dice_empty",
    "root": "rmse_exact",
    "logarithm": "log_determinant",
    "exponential": "low_var_kl",
    "angle": "edge_rotation",
    "masked softmax": "masked_log_softmax",
    "mask product": "entropy_masked_vocabulary",
    "one element": "group_std_single",
    "empty mean": "cross_entropy_empty",
    "untaken branch": "where_log2",
    "loss by hand": "distil_kl",
    "half eps": "half_saturation",
    "zero norm": "clip_by_norm_zero",
    "Python number": "label_token_count",
    "indexed loss": "mse_missing_targets",
    "option of a module": "ctc_short_input",
}
# Those of the quick tests.
QUICK_FAMILIES = ("division", "logarithm", "masked softmax", "loss by hand")
