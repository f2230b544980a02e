//! Signals that end the command: what it has half written goes first, and a simulation says how far it came.

use std::sync::{Arc, Mutex, PoisonError};

use dualgemm_sim::Progress;

/// The simulation that the next Ctrl-C stops.
static SIMULATION: Mutex<Option<Arc<Progress>>> = Mutex::new(None);

fn swap(simulation: Option<Arc<Progress>>) -> Option<Arc<Progress>> {
    std::mem::replace(&mut SIMULATION.lock().unwrap_or_else(PoisonError::into_inner), simulation)
}

/// Does work that the first Ctrl-C stops at this simulation; a second one ends the command at once.
pub fn stopping<T>(simulation: &Arc<Progress>, work: impl FnOnce() -> T) -> T {
    swap(Some(simulation.clone()));
    let result = work();
    swap(None);
    result
}

/// From here on a signal that ends this process removes what it has under temporary names.
#[cfg(unix)]
pub fn remove_uncommitted_on_signals() {
    use dualgemm::checkpoint::write::atomic;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::emulate_default_handler;

    let ignored = ignored_signals();
    let ends = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    // Without, the command works as well.
    let Ok(mut signals) = Signals::new(ends) else { return };
    std::thread::spawn(move || {
        for signal in signals.forever() {
            if signal == SIGINT
                && let Some(simulation) = swap(None)
            {
                simulation.stop();
                continue;
            }
            atomic::remove_uncommitted();
            let _ = emulate_default_handler(signal);
        }
    });
}

/// Nothing to do where there are no signals.
#[cfg(not(unix))]
pub fn remove_uncommitted_on_signals() {}

/// A bit for each signal that whoever started this process told it to ignore, as `nohup` does; known on Linux alone.
#[cfg(unix)]
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
