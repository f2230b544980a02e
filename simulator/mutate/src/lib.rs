//! Mutants of PTX kernels: one synchronizing instruction dropped, weakened or moved, to see whether the simulator notices.
//!
//! Flow: [`mutants`] lists the edits of a module; [`Host::run`] executes a host program with one edited module in place
//! of the original and says what became of it ([`Fate`]); [`Survivors`] is the list of those that are proven harmless.
//! Nothing here knows what a kernel computes: a host program returns the bytes of its result, and a mutant is wrong if
//! it returns others.
//!
//! ```
//! use dualgemm_device::{Args, Device, LaunchSpec};
//! use dualgemm_mutate::{Fate, Host, mutants};
//! use dualgemm_sim::{Check, Config};
//!
//! let ptx = r"
//! .version 8.0 .target sm_80 .address_size 64
//! .visible .entry turn(.param .u64 out)
//! {
//!     .shared .align 4 .b8 s[256];
//!     .reg .b32 r<5>; .reg .b64 rd<3>;
//!     ld.param.u64 rd0, [out];
//!     mov.u32 r0, %tid.x;
//!     mov.u32 r1, s;
//!     shl.b32 r2, r0, 2;
//!     add.u32 r3, r1, r2;
//!     st.shared.u32 [r3], r0;
//!     bar.sync 0;
//!     sub.u32 r3, 252, r2;
//!     add.u32 r3, r3, r1;
//!     ld.shared.u32 r4, [r3];
//!     cvt.u64.u32 rd1, r2;
//!     add.u64 rd2, rd0, rd1;
//!     st.global.u32 [rd2], r4;
//!     ret;
//! }";
//! let run = |device: &dyn Device| {
//!     let turn = device.function(device.load(ptx)?, "turn")?;
//!     let out = device.alloc(256)?;
//!     let spec = LaunchSpec::new(turn, [1, 1, 1], [64, 1, 1]).args(Args::new().ptr(out));
//!     // SAFETY: the device is simulated and stops a launch that leaves its memory.
//!     unsafe { device.launch(&spec) }?;
//!     let mut bytes = vec![0; 256];
//!     device.copy_from(&mut bytes, out)?;
//!     Ok(bytes)
//! };
//! let host = Host::new(0, Config::default(), 0..2, &run).unwrap();
//! let mutants = mutants(host.module());
//! let kinds: Vec<String> = mutants.iter().map(|mutant| mutant.kind.to_string()).collect();
//! assert_eq!(kinds, ["drop", "later", "earlier"]);
//! for mutant in &mutants {
//!     let fate = host.run(mutant);
//!     assert!(matches!(fate, Fate::Stopped(Check::Race | Check::Uninit)), "{fate}");
//! }
//! ```

mod host;
mod kinds;
mod survivors;
mod units;

pub use host::{Fate, Host, HostError, Refused};
pub use kinds::{Kind, Mutant, mutants};
pub use survivors::{Row, Survivors};
