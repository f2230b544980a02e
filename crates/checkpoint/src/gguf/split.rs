//! GGUF files that one model was split into, as `llama-gguf-split` names them: `model-00001-of-00003.gguf`.

use std::path::{Path, PathBuf};

use super::GgufValue;
use crate::Error;

const COUNT: &str = "split.count";

/// The files that belong together, the first one first; none but `path` where it was not split.
pub(crate) fn parts(metadata: &[(String, GgufValue)], path: &Path) -> Result<Vec<PathBuf>, Error> {
    // The type bounds the number of files.
    let count = metadata.iter().find_map(|(key, value)| match value {
        GgufValue::U16(count) if key == COUNT && *count > 1 => Some(*count),
        _ => None,
    });
    let Some(count) = count else { return Ok(vec![path.into()]) };
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = name.strip_suffix(&format!("-of-{count:05}.gguf"));
    let stem = stem.and_then(|stem| stem.rsplit_once('-')).filter(|(_, number)| {
        number.parse().is_ok_and(|n: u16| (1..=count).contains(&n) && *number == format!("{n:05}"))
    });
    let Some((stem, _)) = stem else {
        let found = format!("{COUNT} {count} in `{name}`");
        let valid =
            format!("a name that ends in a number as -00001-of-{count:05}.gguf, beside the other files");
        return Err(Error::header(path, "split", found, valid));
    };
    let part = |n| path.with_file_name(format!("{stem}-{n:05}-of-{count:05}.gguf"));
    Ok((1..=count).map(part).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_names_the_others() {
        let count = |n| vec![(COUNT.to_string(), GgufValue::U16(n))];
        let whole = Path::new("d/m-00001-of-00002.gguf");
        assert_eq!(parts(&[], whole).unwrap(), [whole]);
        assert_eq!(parts(&count(1), whole).unwrap(), [whole]);
        for name in ["d/a-b-00001-of-00002.gguf", "d/a-b-00002-of-00002.gguf"] {
            let all = ["d/a-b-00001-of-00002.gguf", "d/a-b-00002-of-00002.gguf"].map(PathBuf::from);
            assert_eq!(parts(&count(2), Path::new(name)).unwrap(), all);
        }
        for name in ["m.gguf", "m-00003-of-00002.gguf", "m-1-of-00002.gguf", "m-00001-of-00003.gguf"] {
            let e = parts(&count(2), Path::new(name)).unwrap_err().to_string();
            assert_eq!(
                e,
                format!(
                    "{name}: header rule `split`: found split.count 2 in `{name}`; valid is a name that ends in a number as \
                     -00001-of-00002.gguf, beside the other files"
                )
            );
        }
    }
}
