//! JSON whose objects have each name once: where a name is there twice, readers take one of the two values, and not all the
//! same one.

use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::Error;

/// Reads an object; `key` says which part of the file the text is.
pub(crate) fn object(text: &[u8], file: &Path, key: &str) -> Result<Value, Error> {
    let found = match serde_json::from_slice(text) {
        Ok(Distinct(value)) if value.is_object() => return Ok(value),
        Ok(_) => "not an object".into(),
        Err(e) if e.is_data() => e.to_string(),
        Err(e) => format!("not JSON ({e})"),
    };
    let valid = "a JSON object of distinct names".into();
    Err(Error::Config { file: file.into(), key: key.into(), found, valid })
}

/// A value in which no object has a name twice.
pub(crate) struct Distinct(pub(crate) Value);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Values).map(Self)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(Distinct(item)) = items.next_element()? {
            all.push(item);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            if all.contains_key(&name) {
                return Err(A::Error::custom(format_args!("ambiguous: the name `{name}` is there twice")));
            }
            let Distinct(value) = entries.next_value()?;
            all.insert(name, value);
        }
        Ok(Value::Object(all))
    }
}
