//! Estimates of the Blackwell kernel, and the page that shows them.

use std::path::Path;

use crate::common::{json, text};

#[test]
fn the_page_on_blackwell_shows_what_the_command_prints_exact() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/kernels/blackwell.md");
    let page = std::fs::read_to_string(page).unwrap();
    let table = text(&["estimate", "--markdown"], 0);
    assert!(page.contains(table.trim_end()), "the page needs:\n{table}");
}

#[test]
fn ranked_shapes_stand_beside_the_speed_of_light_and_nothing_is_called_measured() {
    let report = json(&["estimate"], 0);
    assert_eq!((&report["measured"], &report["card"]), (&false.into(), &"B200".into()));
    let rows = report["shapes"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        let fill = number("step_bytes") / 124.0;
        assert!((number("fill_ns") - fill).abs() < 1e-9);
        let steps = number("waves") * number("steps") * fill.max(number("multiply_ns")) / 1e3;
        assert!((number("loop_us") - steps).abs() < 1e-9);
        assert!(number("kernel_us") > number("speed_of_light_us"), "{row}");
        assert!((number("total_us") - number("kernel_us") - 5.5).abs() < 1e-9);
        assert!(number("ctas") <= 148.0 && number("tmem_columns") <= 512.0);
    }
    let printed = text(&["estimate"], 0);
    assert!(printed.contains("nothing here was measured"), "{printed}");
    assert!(printed.contains(" µs (1.35 × the light of "), "{printed}");
}
