"""Stands for FlashInfer on machines without a GPU.

It takes the calls that we make of FlashInfer 0.2 and later, checks what its documentation demands of
them, and computes the answer in torch from exactly what it was handed.
"""

import torch

WRAPPERS = []  # all that were made, for tests to look at


class _Wrapper:
    def __init__(self, workspace, kv_layout):
        assert workspace.dtype is torch.uint8
        assert kv_layout == "HND"
        self.num_plans = 0
        WRAPPERS.append(self)

    def _plan(self, query_starts, indptr, indices, last_page_len, sizes, options):
        for tensor in (query_starts, indptr, indices, last_page_len):
            assert tensor.dtype is torch.int32
            assert tensor.device.type == "cpu"  # the device of these tests, and the host
        self.num_heads, self.num_kv_heads, self.head_dim, self.page_size = sizes
        assert len(indptr) == len(last_page_len) + 1 == len(query_starts)
        assert (indptr[0], indptr[-1]) == (0, len(indices))
        assert query_starts[0] == 0
        assert ((last_page_len >= 1) & (last_page_len <= self.page_size)).all()
        self.query_starts, self.indptr = query_starts.clone(), indptr.clone()
        self.indices, self.last_page_len = indices.clone(), last_page_len.clone()
        self.options = options
        self.num_plans += 1

    def run(self, q, paged_kv_cache, *, out):
        assert q.is_contiguous()
        assert q.dtype is self.options["q_data_type"]
        assert q.shape == out.shape == (self.query_starts[-1], self.num_heads, self.head_dim)
        assert paged_kv_cache.dtype is self.options["kv_data_type"]
        sizes = (2, self.num_kv_heads, self.page_size, self.head_dim)
        assert paged_kv_cache.shape[1:] == sizes
        assert paged_kv_cache.stride()[2:] == (self.page_size * self.head_dim, self.head_dim, 1)
        for i in range(len(self.last_page_len)):
            rows = slice(self.query_starts[i], self.query_starts[i + 1])
            pages = self.indices[self.indptr[i] : self.indptr[i + 1]].long()
            num_keys = (len(pages) - 1) * self.page_size + int(self.last_page_len[i])
            runs = paged_kv_cache[pages].float().permute(1, 2, 0, 3, 4).flatten(2, 3)
            key, value = runs[:, :, :num_keys]
            out[rows] = self._attend(q[rows].float(), key, value).to(out.dtype)
        return out

    def _attend(self, query, key, value):
        group = self.num_heads // self.num_kv_heads
        key, value = (x.repeat_interleave(group, dim=0) for x in (key, value))
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * self.options["sm_scale"]
        if self.options["logits_soft_cap"] > 0:
            cap = self.options["logits_soft_cap"]
            scores = cap * torch.tanh(scores / cap)
        keys = torch.arange(key.shape[1])
        positions = keys[len(keys) - len(query) :].unsqueeze(1)
        seen = keys <= positions
        if self.options["window_left"] >= 0:
            seen &= keys >= positions - self.options["window_left"]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ value).transpose(0, 1)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores
        self.use_cuda_graph = use_cuda_graph
        self.batch_size = None
        if use_cuda_graph:
            self.batch_size = len(paged_kv_last_page_len_buffer)
            self.max_indices = len(paged_kv_indices_buffer)
            assert len(paged_kv_indptr_buffer) == self.batch_size + 1

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, **options):
        if self.batch_size is not None:
            assert len(last_page_len) == self.batch_size
            assert len(indices) <= self.max_indices
        if not self.use_tensor_cores:
            assert heads // kv_heads in {1, 2, 4, 8}
        starts = torch.arange(len(indptr), dtype=torch.int32)
        sizes = heads, kv_heads, head_dim, page_size
        self._plan(starts, indptr, indices, last_page_len, sizes, options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        heads,
        kv_heads,
        head_dim,
        page_size,
        causal=False,
        **options,
    ):
        assert causal
        sizes = heads, kv_heads, head_dim, page_size
        indptr, indices = paged_kv_indptr, paged_kv_indices
        self._plan(qo_indptr, indptr, indices, paged_kv_last_page_len, sizes, options)
