"""Sublayers. Each returns its update, never the stream plus the update: only junctions add."""

from normstream.layers.attention import Attention as Attention
from normstream.layers.cache import KVCache as KVCache
from normstream.layers.context import Context as Context
from normstream.layers.cross_attention import CrossAttention as CrossAttention
from normstream.layers.feed_forward import Activation as Activation
from normstream.layers.feed_forward import FeedForward as FeedForward
from normstream.layers.feed_forward import default_ffn_dim as default_ffn_dim
from normstream.layers.latent_attention import LatentAttention as LatentAttention
from normstream.layers.latent_attention import LatentConfig as LatentConfig
from normstream.layers.layer import Layer as Layer
from normstream.layers.moe import MoE as MoE
from normstream.layers.moe import MoEConfig as MoEConfig
from normstream.layers.parallel import Parallel as Parallel
from normstream.layers.positions import PositionConfig as PositionConfig
