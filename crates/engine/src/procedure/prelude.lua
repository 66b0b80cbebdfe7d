-- What replaces functions of Lua's library before they are frozen; see vm.rs.
local find, split, format, sort = string.find, string.split, string.format, table.sort
local tostring_plain, mostComparisons = tostring, 2 ^ 30

local function check(name, text, needle)
    if #text * #needle > mostComparisons then
        error(`string.{name}: the text and the needle are too long`, 3)
    end
end

string.find = function(text, pattern, ...)
    if type(text) == "string" and type(pattern) == "string" then
        check("find", text, pattern)
    end
    return find(text, pattern, ...)
end

string.split = function(text, separator, ...)
    if type(text) == "string" and type(separator) == "string" then
        check("split", text, separator)
    end
    return split(text, separator, ...)
end

table.sort = function(list, less)
    return sort(list, less or function(a, b)
        return a < b
    end)
end

local addressed = { table = true, ["function"] = true, userdata = true, buffer = true, thread = true }

local function show(value)
    local kind = type(value)
    -- What an error of SQL's is; only our side makes userdata.
    if kind == "userdata" and typeof(value) == "error" then
        return tostring_plain(value)
    end
    if addressed[kind] then
        local meta = getmetatable(value)
        if type(meta) ~= "table" or rawget(meta, "__tostring") == nil then
            return kind
        end
    end
    return tostring_plain(value)
end

tostring = show

string.format = function(pattern, ...)
    local count = select("#", ...)
    local values = { ... }
    for index = 1, count do
        if addressed[type(values[index])] then
            values[index] = show(values[index])
        end
    end
    return format(pattern, unpack(values, 1, count))
end
