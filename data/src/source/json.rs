//! JSON whose objects keep the order of their keys, as chat templates see them in Python.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Number;

/// A value of JSON.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Json {
    /// `null`.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number.
    Number(Number),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Self>),
    /// An object.
    Object(Object),
}

/// The keys and values of an object, in order. A key occurs once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Object(Vec<(String, Json)>);

impl Object {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.0.iter().find(|(own, _)| own == key).map(|(_, value)| value)
    }

    /// Sets the value of a key. A new key comes last.
    pub fn insert(&mut self, key: String, value: Json) {
        match self.0.iter_mut().find(|(own, _)| *own == key) {
            Some((_, own)) => *own = value,
            None => self.0.push((key, value)),
        }
    }

    /// Takes the value of a key out.
    pub fn remove(&mut self, key: &str) -> Option<Json> {
        let place = self.0.iter().position(|(own, _)| own == key)?;
        Some(self.0.remove(place).1)
    }

    /// Keys and values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Json)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Whether a text or key in the object contains a character.
    #[must_use]
    pub fn contains(&self, character: char) -> bool {
        self.iter().any(|(key, value)| key.contains(character) || value.contains(character))
    }

    /// Removes the keys whose value is null.
    pub fn remove_nulls(&mut self) {
        self.0.retain(|(_, value)| *value != Json::Null);
    }
}

impl FromIterator<(String, Json)> for Object {
    fn from_iter<I: IntoIterator<Item = (String, Json)>>(pairs: I) -> Self {
        let mut builder = Builder::default();
        for (key, value) in pairs {
            builder.insert(key, value);
        }
        builder.finish()
    }
}

/// Most keys that are compared one by one.
const FEW_KEYS: usize = 16;

/// Collects the pairs of an object. A foreign row may have as many keys as fit into a line, so that
/// from [`FEW_KEYS`] on an index finds the ones that occur twice.
#[derive(Default)]
struct Builder {
    object: Object,
    /// Positions of the keys; empty while there are few.
    positions: BTreeMap<String, usize>,
}

impl Builder {
    fn insert(&mut self, key: String, value: Json) {
        let pairs = &mut self.object.0;
        if pairs.len() < FEW_KEYS {
            self.object.insert(key, value);
            return;
        }
        if self.positions.is_empty() {
            let keys = pairs.iter().enumerate();
            self.positions = keys.map(|(position, (key, _))| (key.clone(), position)).collect();
        }
        match self.positions.get(&key) {
            Some(position) => pairs[*position].1 = value,
            None => {
                self.positions.insert(key.clone(), pairs.len());
                pairs.push((key, value));
            }
        }
    }

    fn finish(self) -> Object {
        self.object
    }
}

impl Json {
    /// The text of a text.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The items of a list.
    #[must_use]
    pub fn as_list(&self) -> Option<&[Self]> {
        match self {
            Self::List(list) => Some(list),
            _ => None,
        }
    }

    /// Whether it is null, or a text, list or object without content.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Null => true,
            Self::Text(text) => text.is_empty(),
            Self::List(list) => list.is_empty(),
            Self::Object(object) => object.0.is_empty(),
            Self::Bool(_) | Self::Number(_) => false,
        }
    }

    /// Bytes of all texts in the value.
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::List(list) => list.iter().map(Self::text_bytes).sum(),
            Self::Object(object) => object.iter().map(|(_, value)| value.text_bytes()).sum(),
            _ => 0,
        }
    }

    /// Bytes of all texts and keys in the value.
    #[must_use]
    pub fn all_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::List(list) => list.iter().map(Self::all_bytes).sum(),
            Self::Object(object) => {
                object.iter().map(|(key, value)| key.len() + value.all_bytes()).sum()
            }
            _ => 0,
        }
    }

    /// Whether a text or key in the value contains a character.
    #[must_use]
    pub fn contains(&self, character: char) -> bool {
        match self {
            Self::Text(text) => text.contains(character),
            Self::List(list) => list.iter().any(|value| value.contains(character)),
            Self::Object(object) => object.contains(character),
            _ => false,
        }
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(number) => number.serialize(serializer),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(list) => list.serialize(serializer),
            Self::Object(object) => object.serialize(serializer),
        }
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Json::deserialize(deserializer)? {
            Json::Object(object) => Ok(object),
            _ => Err(serde::de::Error::custom("not an object")),
        }
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Number::from_f64(value).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Json, A::Error> {
        let mut builder = Builder::default();
        while let Some((key, value)) = pairs.next_entry()? {
            builder.insert(key, value);
        }
        Ok(Json::Object(builder.finish()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{Json, Object};

    #[test]
    fn keys_keep_their_order() {
        let text = r#"{"z":1,"a":[true,null,-2.5,{"y":"é","b":{}}],"m":18446744073709551615}"#;
        let json: Json = serde_json::from_str(text).expect("JSON");
        assert_eq!(serde_json::to_string(&json).expect("JSON"), text);
        assert!(json.contains('é') && json.contains('y') && !json.contains('x'));
        let twice: Json = serde_json::from_str(r#"{"a":1,"b":2,"a":3}"#).expect("JSON");
        assert_eq!(serde_json::to_string(&twice).expect("JSON"), r#"{"a":3,"b":2}"#);
    }

    #[test]
    fn the_time_of_an_object_grows_with_its_keys() {
        let begun = Instant::now();
        let keys = (0..200_000).map(|key| format!("\"{}\":{key}", key % 100_000));
        let text = format!("{{{}}}", keys.collect::<Vec<_>>().join(","));
        let object: Object = serde_json::from_str(&text).expect("JSON");
        assert_eq!(object.iter().count(), 100_000);
        assert_eq!(object.iter().next(), Some(("0", &Json::Number(100_000.into()))));
        assert_eq!(object.iter().last(), Some(("99999", &Json::Number(199_999.into()))));
        // Comparisons of all pairs of keys took minutes.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    #[test]
    fn deep_nesting_is_an_error() {
        let deep = "[".repeat(100_000);
        assert!(serde_json::from_str::<Json>(&deep).is_err());
    }
}
