"""Runs a submission on a driver that writes down what it is asked, and prints the calls as JSON.

Arguments: the file, m, n, k, and addresses of A, B1, B2, their scales, C and scratch memory.
"""

import ctypes
import json
import re
import runpy
import sys
import types

path, *numbers = sys.argv[1:]
m, n, k, *addresses = map(int, numbers)


class Tensor:
    """What the submission asks a tensor, with the memory that it is said to have."""

    def __init__(self, address, shape, size):
        self.address, self.shape, self.size, self.device = address, shape, size, "cuda"

    def data_ptr(self):
        return self.address

    def permute(self, order):
        assert sorted(order) == list(range(len(self.shape)))
        return self

    def is_contiguous(self):
        return True

    def numel(self):
        return self.size

    def element_size(self):
        return 1


def parameters(ptx, name):
    """Sizes of a kernel's parameters, read from its text."""
    listed = re.search(r"\.entry " + re.escape(name) + r"\s*\((.*?)\)", ptx, re.S).group(1)
    words = {"u8": 1, "b8": 1, "u16": 2, "b16": 2, "u32": 4, "b32": 4, "f32": 4, "u64": 8, "b64": 8}
    kinds = re.findall(r"\.param(?: \.align \d+)? \.(\w+)[^\[,]*(?:\[(\d+)\])?", listed)
    return [words[kind] * int(count or 1) for kind, count in kinds]


class Driver:
    """The functions of libcuda that a submission may call."""

    def __init__(self):
        self.modules, self.functions, self.shared = [], [], {}
        self.maps, self.launches = [], []

    def cuModuleLoadDataEx(self, out, text, count, options, values):
        assert (count, list(options)) == (2, [5, 6]) and values[1] == 8192
        self.modules.append(text.value.decode())
        out._obj.value = len(self.modules)
        return 0

    def cuModuleGetFunction(self, out, module, name):
        name = name.value.decode()
        self.functions.append([module.value - 1, name, parameters(self.modules[module.value - 1], name)])
        out._obj.value = len(self.functions)
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        assert attribute == 8
        self.shared[function.value] = value.value
        return 0

    def cuTensorMapEncodeTiled(self, out, kind, rank, address, dims, strides, box, steps, *codes):
        assert ctypes.addressof(out._obj) % 64 == 0 and ctypes.sizeof(out._obj) == 128
        arrays = [list(dims), list(strides), list(box), list(steps)]
        assert [len(a) for a in arrays] == [rank.value, rank.value - 1, rank.value, rank.value]
        self.maps.append([kind.value, address.value, *arrays, *(code.value for code in codes)])
        out._obj[:] = b"map" + len(self.maps).to_bytes(125, "little")
        return 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        config = config._obj
        module, name, sizes = self.functions[function.value - 1]
        assert extra is None and config.queue is None and len(arguments) == len(sizes)
        assert config.shared <= self.shared[function.value]
        cluster, programmatic = [1, 1, 1], False
        for attribute in config.attributes[: config.count]:
            if attribute.id == 4:
                cluster = attribute.value[:3]
            else:
                assert (attribute.id, attribute.value[0]) == (6, 1)
                programmatic = True
        values = [ctypes.string_at(at, size) for at, size in zip(arguments, sizes)]
        maps = [int.from_bytes(v[3:], "little") - 1 if v[:3] == b"map" else None for v in values]
        self.launches.append(
            {
                "module": module,
                "name": name,
                "grid": list(config.grid),
                "block": list(config.block),
                "cluster": cluster,
                "shared": config.shared,
                "programmatic": programmatic,
                "args": [{"bytes": list(v)} if i is None else {"map": i} for v, i in zip(values, maps)],
            }
        )
        return 0


driver = Driver()


def open_library(name):
    assert name == "libcuda.so.1"
    return driver


torch = types.ModuleType("torch")
torch.uint8 = "uint8"
torch.empty = lambda size, dtype, device: Tensor(addresses[7], (size,), size)
sys.modules["torch"] = torch
ctypes.CDLL = open_library

codes = [Tensor(address, (rows, k // 2, 1), rows * k // 2) for address, rows in zip(addresses, (m, n, n))]
scales = [Tensor(address, (32, 4, 1, 4, 1, 1), 0) for address in addresses[3:6]]
c = Tensor(addresses[6], (m, n, 1), 2 * m * n)
data = (*codes, None, None, None, *scales, c)

custom_kernel = runpy.run_path(path)["custom_kernel"]
assert custom_kernel(data) is c
first, maps = driver.launches, len(driver.maps)
driver.launches = []
assert custom_kernel(data) is c
assert driver.launches == first and len(driver.maps) == maps, "a second call launches the same"
try:
    custom_kernel((Tensor(addresses[0], (1, k // 2, 1), k // 2), *data[1:9], Tensor(addresses[6], (1, n, 1), 2 * n)))
except ValueError as error:
    assert f"no launches for 1x{n}x{k}" in str(error), error
else:
    raise AssertionError("a shape without launches is refused")
print(json.dumps({"modules": driver.modules, "maps": driver.maps, "launches": first}))
