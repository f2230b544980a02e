//! What to launch and how.

use crate::{Args, FunctionId};

/// One kernel launch: a plain value that can be printed and compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchSpec {
    /// The kernel.
    pub function: FunctionId,
    /// CTAs in x, y, z. With clusters, each dimension is a multiple of the cluster's.
    pub grid: [u32; 3],
    /// Threads of a CTA in x, y, z; at most 1024 in all.
    pub block: [u32; 3],
    /// CTAs of a cluster in x, y, z; `[1, 1, 1]` without clusters. A kernel that declares
    /// `.reqnctapercluster` fixes it.
    pub cluster: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub dynamic_shared: u32,
    /// May start before the previous launch ends (programmatic dependent launch): the kernel waits itself with
    /// `griddepcontrol.wait`.
    pub programmatic: bool,
    /// The arguments in parameter order.
    pub args: Args,
}

impl LaunchSpec {
    /// A launch without clusters, dynamic shared memory and arguments.
    pub fn new(function: FunctionId, grid: [u32; 3], block: [u32; 3]) -> LaunchSpec {
        LaunchSpec {
            function,
            grid,
            block,
            cluster: [1, 1, 1],
            dynamic_shared: 0,
            programmatic: false,
            args: Args::new(),
        }
    }

    /// Sets the cluster shape.
    #[must_use]
    pub fn cluster(self, cluster: [u32; 3]) -> LaunchSpec {
        LaunchSpec { cluster, ..self }
    }

    /// Sets the dynamic shared memory, bytes.
    #[must_use]
    pub fn dynamic_shared(self, bytes: u32) -> LaunchSpec {
        LaunchSpec { dynamic_shared: bytes, ..self }
    }

    /// Allows overlap with the previous launch.
    #[must_use]
    pub fn programmatic(self, yes: bool) -> LaunchSpec {
        LaunchSpec { programmatic: yes, ..self }
    }

    /// Sets the arguments.
    #[must_use]
    pub fn args(self, args: Args) -> LaunchSpec {
        LaunchSpec { args, ..self }
    }
}
