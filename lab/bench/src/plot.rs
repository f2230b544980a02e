//! The roofline plot: arithmetic intensity against rate, both logarithmic, measured points under measured roofs.

use std::path::Path;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::{Error, Report};

const SIZE: (u32, u32) = (960, 600);

/// The format of a plot by the name of its file, `svg` or `png`: to be asked before what is plotted is measured. Fails
/// if the name ends otherwise.
pub fn format(path: &Path) -> Result<&str, Error> {
    let extension = path.extension().and_then(|e| e.to_str()).filter(|e| ["svg", "png"].contains(e));
    extension.ok_or_else(|| Error::PlotFormat { path: path.into() })
}

/// Draws a report as `.svg` or `.png`, by the name of the file. The file appears whole or not at all. Fails if the name
/// ends otherwise, there is nothing to draw, or the file cannot be written.
pub fn roofline(report: &Report, path: &Path) -> Result<(), Error> {
    if report.rows.is_empty() {
        return Err(Error::NothingToPlot);
    }
    let draw_error = |reason: String| Error::Draw { path: path.into(), reason };
    let extension = format(path)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The bitmap encoder goes by the name of the file, so the temporary name keeps the extension.
    let suffix = format!(".{extension}");
    let mut builder = tempfile::Builder::new();
    builder.suffix(&suffix);
    // Temporary files are private by default; a plot is as readable as any new file (the umask still applies).
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let temporary = builder.tempfile_in(folder).map_err(|e| draw_error(e.to_string()))?;
    match extension {
        "svg" => draw(report, SVGBackend::new(temporary.path(), SIZE).into_drawing_area()),
        _ => draw(report, BitMapBackend::new(temporary.path(), SIZE).into_drawing_area()),
    }
    .map_err(draw_error)?;
    temporary.persist(path).map_err(|e| draw_error(e.error.to_string()))?;
    Ok(())
}

/// Text in a bitmap needs a font, and a bare machine has none.
fn register_fonts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // The only error is a font that does not parse; this one is a constant, and the tests draw with it.
        let _ = register_font("sans-serif", FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
}

fn draw<B: DrawingBackend>(report: &Report, area: DrawingArea<B, Shift>) -> Result<(), String> {
    draw_on(report, &area).map_err(|e| e.to_string())
}

fn draw_on<B: DrawingBackend>(
    report: &Report,
    area: &DrawingArea<B, Shift>,
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    register_fonts();
    let points = report.rows.iter().map(|row| (row.flops_per_byte, row.gflops));
    let (mut x, mut y) = ((f64::MAX, f64::MIN), (f64::MAX, f64::MIN));
    for (px, py) in points.clone() {
        x = (x.0.min(px), x.1.max(px));
        y = (y.0.min(py), y.1.max(py));
    }
    for roof in &report.rooflines {
        x.1 = x.1.max(roof.roofline.ridge());
        y.1 = y.1.max(roof.roofline.flops_per_s * 1e-9);
    }
    let (x, y) = ((x.0 / 2.0, x.1 * 2.0), (y.0 / 2.0, y.1 * 2.0));

    area.fill(&WHITE)?;
    let title = format!("dualgemm on {}", report.rows[0].subject.device);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((x.0..x.1).log_scale(), (y.0..y.1).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("FLOP per byte")
        .y_desc("GFLOP/s")
        .label_style(("sans-serif", 14))
        .light_line_style(WHITE)
        .draw()?;
    for (index, roof) in report.rooflines.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let rate =
            |intensity: f64| (intensity * roof.roofline.bytes_per_s).min(roof.roofline.flops_per_s) * 1e-9;
        let line = [x.0, roof.roofline.ridge().clamp(x.0, x.1), x.1].map(|i| (i, rate(i)));
        chart
            .draw_series(LineSeries::new(line, color.stroke_width(2)))?
            .label(format!("{} roof, measured", roof.name))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart.draw_series(points.map(|point| Circle::new(point, 4, BLACK.filled())))?;
    chart.draw_series(report.rows.iter().map(|row| {
        let label = format!("{}x{}x{}", row.m, row.n, row.k);
        EmptyElement::at((row.flops_per_byte, row.gflops)) + Text::new(label, (6, 4), ("sans-serif", 12))
    }))?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .label_font(("sans-serif", 14))
        .background_style(WHITE)
        .border_style(BLACK)
        .draw()?;
    area.present()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn draws_svg_and_png_with_text() {
        let dir = tempfile::tempdir().unwrap();
        let svg = dir.path().join("roof.svg");
        roofline(&report(), &svg).unwrap();
        let text = std::fs::read_to_string(&svg).unwrap();
        assert!(text.contains("1x4096x7168") && text.contains("int8 roof, measured"), "labels are there");
        let png = dir.path().join("roof.png");
        roofline(&report(), &png).unwrap();
        assert!(std::fs::read(&png).unwrap().starts_with(b"\x89PNG\r\n\x1a\n"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "no temporary file stays");
    }

    #[test]
    fn other_formats_and_empty_reports_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = roofline(&report(), &dir.path().join("roof.pdf")).unwrap_err().to_string();
        assert!(error.ends_with("roof.pdf: plots are written as .svg or .png"), "{error}");
        let empty = Report::new(vec![], vec![]);
        assert!(matches!(roofline(&empty, &dir.path().join("roof.svg")), Err(Error::NothingToPlot)));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_unwritable_place_is_an_error_with_the_path() {
        let error = roofline(&report(), Path::new("/nowhere/roof.svg")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/roof.svg: "), "{error}");
    }
}
