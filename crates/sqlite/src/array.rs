//! Arrays in PostgreSQL's text format: `{a,"b c",NULL}`. SQLite has no arrays: they are stored as
//! text, and converted to JSON for SQLite's table-valued functions.
//!
//! Quotes distinguish texts from numbers: `{"5"}` contains a text, `{5}` a number. PostgreSQL's
//! vectors (`1 2 3`, the columns of an index) can be read as arrays too.

/// An element; `None` is NULL.
pub type Element = Option<String>;

/// Formats an array. If `texts` is true all elements except NULL are quoted.
pub fn write<T: AsRef<str>>(elements: impl Iterator<Item = Option<T>>, texts: bool) -> String {
    let mut array = String::from("{");
    for (place, element) in elements.enumerate() {
        if place > 0 {
            array.push(',');
        }
        let Some(element) = element else {
            array.push_str("NULL");
            continue;
        };
        let text = element.as_ref();
        let special = |byte: u8| b"{}\",\\".contains(&byte) || byte.is_ascii_whitespace();
        if !texts && !text.is_empty() && !text.eq_ignore_ascii_case("null") && !text.bytes().any(special) {
            array.push_str(text);
            continue;
        }
        array.push('"');
        for character in text.chars() {
            if matches!(character, '"' | '\\') {
                array.push('\\');
            }
            array.push(character);
        }
        array.push('"');
    }
    array.push('}');
    array
}

/// Parses a one-dimensional array or a vector. An array in memory may be many times larger than its
/// text, so the elements are parsed one after another.
pub fn read(text: &str) -> impl Iterator<Item = Element> + '_ {
    elements(text).map(|(element, _)| element)
}

/// Converts an array to JSON, numbers as JSON numbers. NULL becomes `[null]`, so that a comparison
/// with any or all elements is NULL.
pub fn json(array: Option<&str>) -> String {
    let Some(array) = array else { return "[null]".to_owned() };
    let mut json = String::from("[");
    for (place, (element, quoted)) in elements(array).enumerate() {
        if place > 0 {
            json.push(',');
        }
        match element {
            None => json.push_str("null"),
            Some(text) if !quoted && is_number(&text) => json.push_str(&text),
            Some(text) => put_string(&mut json, &text),
        }
    }
    json.push(']');
    json
}

/// Whether a text is a JSON number: an integer, or a decimal without an exponent.
fn is_number(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let (whole, fraction) =
        digits.split_once('.').map_or((digits, None), |(whole, fraction)| (whole, Some(fraction)));
    let all_digits =
        |text: &str| !text.is_empty() && text.len() < 40 && text.bytes().all(|byte| byte.is_ascii_digit());
    all_digits(whole) && (whole == "0" || !whole.starts_with('0')) && fraction.is_none_or(all_digits)
}

fn put_string(json: &mut String, text: &str) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            control if control < ' ' => json.push_str(&format!("\\u{:04x}", control as u32)),
            other => json.push(other),
        }
    }
    json.push('"');
}

/// Iterates over the elements, each with whether it was quoted.
fn elements(text: &str) -> impl Iterator<Item = (Element, bool)> + '_ {
    let text = text.trim();
    let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
    let (mut rest, vector) = match inner {
        Some(inner) => (inner, None),
        None => ("", Some(text.split_ascii_whitespace())),
    };
    let mut more = !rest.trim().is_empty();
    let array = std::iter::from_fn(move || {
        if !std::mem::take(&mut more) {
            return None;
        }
        let (element, quoted, behind) = element(rest);
        if let Some(behind) = behind {
            (rest, more) = (behind, true);
        }
        let is_null = !quoted && element.eq_ignore_ascii_case("null");
        Some(((!is_null).then_some(element), quoted))
    });
    let vector = vector.into_iter().flatten().map(|element| (Some(element.to_owned()), false));
    array.chain(vector)
}

/// Parses the first element. Returns it, whether it was quoted, and the text after its comma.
fn element(text: &str) -> (String, bool, Option<&str>) {
    let text = text.trim_ascii_start();
    let (mut element, mut quoted, mut inside) = (String::new(), false, false);
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => element.extend(characters.next().map(|(_, character)| character)),
            '"' => (inside, quoted) = (!inside, true),
            ',' if !inside => {
                let element = if quoted { element } else { element.trim().to_owned() };
                return (element, quoted, Some(&text[at + 1..]));
            }
            blank if blank.is_ascii_whitespace() && quoted && !inside => {}
            other => element.push(other),
        }
    }
    let element = if quoted { element } else { element.trim().to_owned() };
    (element, quoted, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<Element> {
        read(text).collect()
    }

    #[test]
    fn arrays_have_any_number_of_elements() {
        let text = format!("{{1{}}}", ",1".repeat(2_000_000));
        assert_eq!(read(&text).count(), 2_000_001);
        assert_eq!(json(Some(&text)).len(), text.len());
        assert_eq!(write(read(&text), false), text);
    }

    #[test]
    fn arrays_are_written_and_read() {
        let elements = [Some("a"), Some("b c"), None, Some(""), Some("null"), Some("q\"\\"), Some("5")];
        let text = write(elements.into_iter(), false);
        assert_eq!(text, r#"{a,"b c",NULL,"","null","q\"\\",5}"#);
        let owned: Vec<Element> = elements.iter().map(|element| element.map(str::to_owned)).collect();
        assert_eq!(all(&text), owned);
        assert_eq!(all(&write(elements.into_iter(), true)), owned);
        assert_eq!(all("{}"), []);
        assert_eq!(all("{ a , \"b\" }"), [Some("a".to_owned()), Some("b".to_owned())]);
        assert_eq!(all("1 2"), [Some("1".to_owned()), Some("2".to_owned())]);
        assert_eq!(json(Some(&text)), r#"["a","b c",null,"","null","q\"\\",5]"#);
        assert_eq!(json(Some(r#"{"5",-1.5,007,1e3}"#)), r#"["5",-1.5,"007","1e3"]"#);
        assert_eq!((json(Some("{}")).as_str(), json(None).as_str()), ("[]", "[null]"));
    }
}
