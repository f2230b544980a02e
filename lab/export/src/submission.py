"""NVFP4 dual GEMM for the GPU MODE task nvfp4_dual_gemm: C = silu(A B1^T) * (A B2^T), codes and scales as they come.

{about}

The kernels are PTX, which the driver assembles on the first call of a shape. Launches are data: the program that wrote
this file computed grids, tensor maps and arguments for every shape below. Between calls only code is kept, and the
argument lists of the addresses seen last, which follow from shape and addresses alone. Work goes to the default queue.
"""

import ctypes

import torch

#: Modules, PTX.
PTX = [
{ptx}
]

#: Kernels: module, name, dynamic shared memory in bytes.
KERNELS = [
{kernels}
]

#: What each shape (m, n, k) takes: bytes of scratch memory, and its launches in order, each with its kernel, grid, block,
#: cluster, whether it may start before the launch before has ended, and its arguments:
#: ["bytes", hex], ["address", slot, offset] or ["map", slot, offset, type, dims, strides, box, steps, interleave,
#: swizzle, l2 promotion, fill]. Slots are A, B1, B2, their scales in 128x4 order, C, and the scratch memory.
SHAPES = {
{shapes}
}

#: Members of the ten-tuple that are the slots, and the order of their dimensions in memory.
OPERANDS = [(i, (2, 0, 1)) for i in (0, 1, 2)] + [(i, (5, 2, 4, 0, 1, 3)) for i in (6, 7, 8)] + [(9, (2, 0, 1))]

# Numbers of cuda.h.
MAX_DYNAMIC_SHARED = 8
JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES = 5, 6
CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("queue", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


driver = ctypes.CDLL("libcuda.so.1")


def check(status, what):
    """Raises what the driver says of a call that failed."""
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def load(ptx):
    """Assembles a module."""
    module, size = ctypes.c_void_p(), 8192
    log = ctypes.create_string_buffer(size)
    options = (ctypes.c_int * 2)(JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), size)
    status = driver.cuModuleLoadDataEx(ctypes.byref(module), ctypes.c_char_p(ptx.encode()), 2, options, values)
    check(status, "cuModuleLoadDataEx: " + log.value.decode(errors="replace"))
    return module


modules, functions = {}, {}


def function(index):
    """A kernel, loaded once."""
    if index not in functions:
        module, name, shared = KERNELS[index]
        if module not in modules:
            modules[module] = load(PTX[module])
        handle = ctypes.c_void_p()
        status = driver.cuModuleGetFunction(ctypes.byref(handle), modules[module], ctypes.c_char_p(name.encode()))
        check(status, f"cuModuleGetFunction {name}")
        check(driver.cuFuncSetAttribute(handle, MAX_DYNAMIC_SHARED, ctypes.c_int(shared)), "cuFuncSetAttribute")
        functions[index] = handle
    return functions[index]


def tensor_map(address, kind, dims, strides, box, steps, interleave, swizzle, l2, fill):
    """A CUtensorMap: 128 bytes at a multiple of 64."""
    memory = ctypes.create_string_buffer(128 + 64)
    at = -ctypes.addressof(memory) % 64
    encoded = (ctypes.c_char * 128).from_buffer(memory, at)
    rank = len(dims)
    status = driver.cuTensorMapEncodeTiled(
        ctypes.byref(encoded),
        ctypes.c_int(kind),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*steps),
        ctypes.c_int(interleave),
        ctypes.c_int(swizzle),
        ctypes.c_int(l2),
        ctypes.c_int(fill),
    )
    check(status, "cuTensorMapEncodeTiled")
    return encoded


def argument(addresses, kind, *rest):
    """The memory of one kernel argument."""
    if kind == "bytes":
        value = bytes.fromhex(rest[0])
        return (ctypes.c_char * len(value)).from_buffer_copy(value)
    slot, offset, *rest = rest
    address = addresses[slot] + offset
    return ctypes.c_uint64(address) if kind == "address" else tensor_map(address, *rest)


def launch_of(spec, addresses):
    """What cuLaunchKernelEx takes for one launch: its configuration, kernel and arguments."""
    kernel, grid, block, cluster, programmatic, given = spec
    attributes = (Attribute * 2)()
    count = 0
    if cluster != [1, 1, 1]:
        attributes[count].id = CLUSTER_DIMENSION
        attributes[count].value[:3] = cluster
        count += 1
    if programmatic:
        attributes[count].id = PROGRAMMATIC_SERIALIZATION
        attributes[count].value[0] = 1
        count += 1
    shared = KERNELS[kernel][2]
    config = Config((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared, None, attributes, count)
    values = [argument(addresses, *arg) for arg in given]
    arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    # `config` keeps the attributes alive, the last member the values.
    return config, function(kernel), arguments, values


def launches_of(data):
    """Every launch of a call, and the scratch memory that they use."""
    c = data[9]
    m, n, l = c.shape
    k = 2 * data[0].shape[1]
    if (m, n, k) not in SHAPES:
        known = ", ".join("{}x{}x{}".format(*shape) for shape in SHAPES)
        raise ValueError(f"this file holds no launches for {m}x{n}x{k}; it holds those of {known}")
    for index, order in OPERANDS:
        if not data[index].permute(order).is_contiguous():
            raise ValueError(f"member {index} of the input is not laid out as the task lays it out")
    scratch_bytes, specs = SHAPES[m, n, k]
    scratch = torch.empty(max(scratch_bytes, 1), dtype=torch.uint8, device=c.device)
    launches = []
    for entry in range(l):
        addresses = []
        for index, _ in OPERANDS:
            tensor = data[index]
            addresses.append(tensor.data_ptr() + tensor.numel() * tensor.element_size() // l * entry)
        addresses.append(scratch.data_ptr())
        launches += [launch_of(spec, addresses) for spec in specs]
    return launches, scratch


recent = {}


def custom_kernel(data):
    """C of the ten-tuple, written into its last member."""
    a, b1, b2, _, _, _, sfa, sfb1, sfb2, c = data
    key = (
        *c.shape,
        a.shape[1],
        a.data_ptr(),
        b1.data_ptr(),
        b2.data_ptr(),
        sfa.data_ptr(),
        sfb1.data_ptr(),
        sfb2.data_ptr(),
        c.data_ptr(),
    )
    made = recent.get(key)
    if made is None:
        if len(recent) >= 64:
            recent.clear()
        made = recent[key] = launches_of(data)
    for config, kernel, arguments, _ in made[0]:
        status = driver.cuLaunchKernelEx(ctypes.byref(config), kernel, arguments, None)
        if status:
            check(status, "cuLaunchKernelEx")
    return c
