//! The shape of a JSON document: every field with the types it was seen with.
//!
//! A field is written as a path: `/choices[]/text`. All items of an array are one, and so are the
//! entries of a map whose keys are identities.

use std::collections::BTreeMap;

use serde_json::Value;

use super::without_identities;

/// Types by path, as `string` or, where several were seen, `null|number`.
pub type Document = BTreeMap<String, String>;

/// The fields of one document.
pub fn fields(value: &Value) -> Document {
    let mut out = Document::new();
    walk("", value, &mut out);
    out
}

/// Puts the fields of `more` to those of `all`.
pub fn merge(all: &mut Document, more: Document) {
    for (path, kinds) in more {
        for kind in kinds.split('|') {
            note(all, &path, kind);
        }
    }
}

fn note(out: &mut Document, path: &str, kind: &str) {
    let entry = out.entry(path.to_owned()).or_default();
    let mut kinds: Vec<&str> = entry.split('|').filter(|kind| !kind.is_empty()).collect();
    if !kinds.contains(&kind) {
        kinds.push(kind);
        kinds.sort_unstable();
        *entry = kinds.join("|");
    }
}

fn walk(path: &str, value: &Value, out: &mut Document) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "float",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(items) if items.is_empty() => "empty array",
        Value::Object(entries) if entries.is_empty() => "empty object",
        Value::Array(items) => {
            for item in items {
                walk(&format!("{path}[]"), item, out);
            }
            return;
        }
        Value::Object(entries) => {
            for (key, inner) in entries {
                walk(&format!("{path}/{}", without_identities(key)), inner, out);
            }
            return;
        }
    };
    note(out, path, kind);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn arrays_and_maps_by_identity_are_merged() {
        let document = fields(&json!({
            "choices": [{"text": "a", "n": 1}, {"text": null, "n": 1.5}],
            "top": [{"token_id:1": -0.5, "token_id:22": -1}],
            "none": [], "map": {},
        }));
        let expected = [
            ("/choices[]/n", "float|integer"),
            ("/choices[]/text", "null|string"),
            ("/map", "empty object"),
            ("/none", "empty array"),
            ("/top[]/token_id:{id}", "float|integer"),
        ];
        let expected = expected.map(|(path, kind)| (path.to_owned(), kind.to_owned()));
        assert_eq!(document, BTreeMap::from(expected));
    }

    proptest! {
        #[test]
        fn merging_with_itself_changes_nothing(keys in prop::collection::vec("[a-z]{1,3}", 0..5)) {
            let value: Value = keys.iter().map(|key| (key.clone(), json!([1, key]))).collect();
            let one = fields(&value);
            let mut two = one.clone();
            merge(&mut two, one.clone());
            prop_assert_eq!(one, two);
        }
    }
}
