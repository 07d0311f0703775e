"""From any ``nn.Module`` to a chain of units made of segments: capture, cut, shard, rewrite, fuse,
split.
"""
