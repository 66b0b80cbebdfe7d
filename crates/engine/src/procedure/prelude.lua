-- What replaces functions of Lua's library before they are frozen; see vm.rs.
local format, sort = string.format, table.sort
local tostring_plain, mostComparisons = tostring, 2 ^ 30

local function bounded(name)
    local search = string[name]
    string[name] = function(text, needle, ...)
        if type(text) == "string" and type(needle) == "string" and #text * #needle > mostComparisons then
            error(`string.{name}: the text and the needle are too long`, 2)
        end
        return search(text, needle, ...)
    end
end

bounded("find")
bounded("split")

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
