"""Names of what options choose from. What has these names imports torch, which takes seconds; a test compares them."""

DTYPE_NAMES = ("float32", "bfloat16", "float16")
TRANSPORT_NAMES = (
    *("local", "collective", "gathered", "peer", "nvlink", "hierarchical"),  # "nvlink" is an older name of "peer"
    *("deepep", "deepep_low_latency", "deepep_normal", "deepep_v2", "nvshmem"),
)
EXPERTS_NAMES = ("torch", "triton", "hopper")
PLACEMENT_NAMES = ("linear", "round_robin")
SCHEME_NAMES = (
    "none",
    *("fp8_tensor", "fp8_token", "fp8_block", "fp8_block_ue8m0", "fp8_tensor_channel", "int8_token", "int8_block"),
    *("fp8_w8a16", "fp8_w8a16_tensor", "fp8_w8a16_block", "int8_w8a16", "int4_w4a16", "int4_w4a8"),
    *("mxfp8", "mxfp8_w8a16", "mxfp4_w4a16", "mxfp4_w4a8"),
    *("nvfp4", "nvfp4_divisor", "nvfp4_w4a16", "nvfp4_w4a16_divisor"),
)
