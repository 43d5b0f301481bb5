"""Text as training samples: corpora, tokenizers, token shards, packing and the order of the samples.

>>> from normstream.data import DataConfig, Loader, load_data
>>> data = load_data(DataConfig(source="stdlib", seq_len=64))
>>> Loader(data.train, batch_size=2, seed=0).batch(step=0).inputs_BT.shape
torch.Size([2, 64])
"""

from normstream.data.config import DataConfig
from normstream.data.corpus import Data, load_data, load_whole
from normstream.data.loader import Loader
from normstream.data.packing import IGNORE, Batch, PackedTokens
from normstream.data.shards import Shard, read_shard, write_shard
from normstream.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, train_bpe

__all__ = [
    "IGNORE",
    "Batch",
    "ByteTokenizer",
    "Data",
    "DataConfig",
    "FileTokenizer",
    "Loader",
    "PackedTokens",
    "Shard",
    "Tokenizer",
    "load_data",
    "load_tokenizer",
    "load_whole",
    "read_shard",
    "train_bpe",
    "write_shard",
]
